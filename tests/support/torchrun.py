"""The same training in any number of processes, each started as torchrun starts it. Also the program of one of them.

train(folder, {"name": {...settings of train...}}, count=2)
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from composer_stages import train
from composer_stages.backends import ranks
from composer_stages.rollouts.trace import opening_row
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import PAIR, STATE, VECTORS
from composer_stages.runs.run import Manifest, Run, RunWriter, write_manifest

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 900
Cases = Mapping[str, Mapping[str, Any]]
Value = TypeVar("Value")


class OwnRollouts(ranks.Ranks):
    """Broken on purpose: the first process hears of no rollout but its own."""

    def gather_to_rank0(self, value: Value) -> list[Value]:
        """Its own."""
        super().gather_to_rank0(value)
        return [value]


class OwnGradients(ranks.Ranks):
    """Broken on purpose: every process steps by its own gradients."""

    def average_gradients(self, parameters: Any) -> None:
        """Left as they are."""


class OwnDenominators(ranks.Ranks):
    """Broken on purpose: the first process' rows are dealt, but each takes for the step's rows what it was dealt."""

    def broadcast_from_rank0(self, make: Callable[[], Value]) -> Value:
        """Rows repeated so that every part of them is this process' own."""
        from composer_stages.training.step import Batch

        value = super().broadcast_from_rank0(make)
        if not isinstance(value, Batch):
            return value
        own = value.part(self.rank, self.count)
        return Batch({name: [row for row in rows for _ in range(self.count)] for name, rows in own.rows.items()})  # type: ignore


BROKEN = {kind.__name__: kind for kind in (OwnRollouts, OwnGradients, OwnDenominators)}


def start(folder: Path, cases: Cases, count: int) -> list[subprocess.Popen[str]]:
    """So many processes that make one run of `train` a case, or go on with it.

    A case holds settings, and maybe `from_pairs` and `from_direction`, paths of runs, and `broken`, how they talk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store.write_json(folder / "cases.json", cases)
    return launch(["-m", "support.torchrun", str(folder)], count)


def launch(arguments: list[str], count: int) -> list[subprocess.Popen[str]]:
    """So many Pythons with these arguments, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *arguments]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    processes = []
    for rank in range(count):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return processes


def train_all(folder: Path, cases: Cases, count: int) -> dict[str, Run]:
    """`start`, and wait for the end of all."""
    wait(start(folder, cases, count))
    return {name: Run(folder / name) for name in cases}


def wait(processes: list[subprocess.Popen[str]]) -> None:
    """Until all have ended; all must have ended well."""
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, "\n".join(said)[-4000:]


def manifest(stage: str) -> Manifest:
    """The manifest of a run that is to be written."""
    return Manifest(composer="test", stage=stage, stage_version=1, fingerprint="0", label="", started_at="", config={})


def pairs_run(folder: Path, count: int) -> Run:
    """A finished run that holds preference pairs of different lengths."""
    record = manifest("extract-pairs")
    out = RunWriter(folder, record, cache=folder)
    letters = "abcdefghijkl"
    rows = [
        {**dict.fromkeys(PAIR.schema.names), "pair_id": str(i), "state_id": f"r/{i}", "task_id": f"t{i}"}
        | {"chosen": letters[: i % 7 + 1], "rejected": letters[-(i % 4) - 2 :]}
        for i in range(count)
    ]
    out.table(PAIR, rows)
    said = ([{"role": "user", "content": letters[i % 12] * (i % 3 + 1)}] for i in range(count))
    out.table(STATE, (opening_row(f"r/{i}", messages, "") for i, messages in enumerate(said)))
    record.status = "complete"
    write_manifest(folder, record)
    return Run(folder)


def direction_run(folder: Path, count: int) -> Run:
    """A finished run that holds the pairs of ids of a direction."""
    record = manifest("probe-extract-vhack")
    output = {"file": "direction", "kind": str(VECTORS), "rows": 1, "sha256": "", "content_sha256": ""}
    record.outputs, record.status = {"direction": output}, "complete"
    write_manifest(folder, record)

    def row(*completion: int) -> dict[str, list[Any]]:
        return {"prompt_ids": [1, 2, 3], "completion_ids": list(completion), "own": [True] * len(completion)}

    pairs = [[row(4 + i, 5, 6), row(7, 8 + i)] for i in range(count)]
    store.write_json(folder / "direction" / "pairs.json", pairs)
    return Run(folder)


def main(folder: Path) -> None:
    """Train all cases as one of the processes."""
    for name, settings in store.read_json(folder / "cases.json").items():
        here = ranks.join(BROKEN.get(settings.pop("broken", None), ranks.Ranks))
        given = {kind: settings.pop(f"from_{kind}", None) for kind in ("pairs", "direction")}
        inputs = {kind: Run(Path(path)) for kind, path in given.items() if path}
        config = train.Config(**settings)
        if here.first:
            runner.execute("train", inputs, config, root=folder, out=folder / name, resume=True)
        else:
            runner.execute_as_peer("train", inputs, config, root=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
