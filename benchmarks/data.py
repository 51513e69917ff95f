"""Pairs from many teachers beside pandas: time and memory of reading, deciding, writing.

    python benchmarks/data.py [--rows 750000] [--rounds 5]

What is measured runs in processes of their own; memory is the largest resident set (VmHWM, Linux).
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from records import Claim, measured, ratio

from stages.envs.base import Task
from stages.pairs.stage import pair_rows
from stages.pairs.states import AnsweredStates, patterns
from stages.runs import store
from stages.runs.kinds import PAIR, ROLLOUT, STEP, TASK, TEACHER_ACTION, Row
from stages.runs.run import InputRef, Manifest, Run, write_manifest
from stages.runs.tables import Scan

TEACHERS, STEPS = ("one", "two", "three"), 50

ROLLOUTS_A_TASK = 4
PART = 20_000
"""States that are made together."""
COMMANDS = [f"```bash\nsed -n {number % 100}p file_{number // 100}.py\n```" for number in range(10_000)]
OF_PAIRS = ("state_sha256", "chosen", "rejected")
Find = Callable[[], Iterable[Row]]
"""Gives the pairs that were found, once time and memory are taken."""


def pairs(rows: int = 750_000, rounds: int = 5) -> Iterator[Claim]:
    """The pairs of `extract-pairs` beside those of pandas on many rows of teachers, from Parquet to Parquet.

    Three teachers on every state of rollouts of 50 steps; a teacher does in 6 of 10 states what the others do, and the
    student in half of them. Both have their turn in every round. pandas does the least that can be called the same: it
    joins, takes the majority of equal texts, and writes chosen and rejected where it is against the student. `vote` is
    what of ours can be called the same, though it does more: canonical forms, both rules, who backs each pair and what
    it cost, all columns of `pair/1`. Both find the same pairs against the student.
    """
    cases.needed("pandas", by="python -m pip install pandas")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        made_rows = make(Path(folder), rows)
        for name in rounds * list(CONTENDERS):
            found[name].append(one := cases.apart(contend, name, folder))
            print(f"{name:14} {one['cpu']:8.2f} s of CPU, {one['peak']:6.0f} MB, {one['pairs']}", flush=True)
    what = f"pairs from {made_rows:,} rows of three teachers, vote"
    assert len({one["pairs"] for each in found.values() for one in each}) == 1, "all must find the same"
    highest = max(one["peak"] for one in found["vote"])
    yield measured(f"{what}: peak memory", highest, unit="MB", n=rounds, goal="<= 500")
    theirs, ours = ([one["cpu"] for one in found[name]] for name in ("pandas", "vote"))
    claim = f"{what}: times as fast as pandas, by processor time"
    yield measured(claim, *ratio(theirs, ours), n=rounds, goal=">= 1")


def contend(name: str, folder: str) -> dict[str, Any]:
    """Let a contender find the pairs: seconds of the processor, the peak in MB, and what was found."""
    busy = time.process_time()
    found = CONTENDERS[name](Path(folder))
    spent = {"cpu": time.process_time() - busy, "peak": cases.memory("VmHWM") / 1e6}
    return spent | {"pairs": against(found())}


def make(folder: Path, rows: int) -> int:
    """Two finished runs; returns how many rows of teachers there are."""
    states = rows // len(TEACHERS)
    first = written(folder / "rollouts", "collect", [(TASK, tasks), (ROLLOUT, rollouts), (STEP, steps)], states)
    asked = {"rollouts": [InputRef(stage="collect", path="rollouts", fingerprint="0", content=first.content)]}
    second = written(folder / "answers", "replay-teachers", [(TEACHER_ACTION, answers)], states, asked)
    return int(second.outputs["teacher_actions"]["rows"])


def written(folder: Path, stage: str, tables: list, states: int, inputs: dict | None = None) -> Manifest:
    """A finished run with these tables; each gives its columns of some states, and the others are null."""
    about = Manifest(
        composer="0", stage=stage, stage_version=1, fingerprint="0", status="complete", inputs=inputs or {}
    )
    for kind, columns_of in tables:
        file, number = folder / f"{kind.name}s.parquet", 0
        file.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(file, kind.schema, compression="zstd") as writer:
            for begin in range(0, states, PART):
                columns = columns_of(np.arange(begin, min(begin + PART, states)))
                size = len(next(iter(columns.values())))
                told = [
                    pa.array(columns.get(name, [None] * size), of)
                    for name, of in zip(kind.schema.names, kind.schema.types, strict=True)
                ]
                writer.write_batch(pa.record_batch(told, schema=kind.schema))
                number += size
        digests = dict.fromkeys(("sha256", "content_sha256"), store.file_sha256(file))
        about.outputs[f"{kind.name}s"] = {"file": file.name, "kind": str(kind), "rows": number, **digests}
    write_manifest(folder, about)
    return about


def place(state: np.ndarray) -> dict:
    """Where states lie: their rollouts, tasks, steps."""
    rollout = state // STEPS
    return {
        "rollout_id": [f"r{number:07d}" for number in rollout],
        "task_id": [f"t{number}" for number in rollout // ROLLOUTS_A_TASK],
        "step": state % STEPS,
        "state_sha256": [hashlib.sha256(b"%d" % number).hexdigest() for number in state],
    }


def tasks(state: np.ndarray) -> dict:
    """One for every four rollouts."""
    numbers = state[state % (STEPS * ROLLOUTS_A_TASK) == 0] // (STEPS * ROLLOUTS_A_TASK)
    same = {name: [value] * len(numbers) for name, value in (("env", "e"), ("split", "s"), ("family", "f"))}
    return {"task_id": [f"t{number}" for number in numbers], "data_json": ["{}"] * len(numbers), **same}


def rollouts(state: np.ndarray) -> dict:
    """Every third passes."""
    numbers = state[state % STEPS == 0] // STEPS
    about = {"task_id": [f"t{number // ROLLOUTS_A_TASK}" for number in numbers], "hidden_pass": numbers % 3 == 0}
    return {"rollout_id": [f"r{number:07d}" for number in numbers], **about}


def texts(numbers: np.ndarray) -> list[str]:
    """Of ten thousand commands."""
    return [COMMANDS[number] for number in numbers]


def common(state: np.ndarray) -> np.ndarray:
    """What most do in a state."""
    return np.random.default_rng([0, state[0]]).integers(10_000, size=len(state))


def steps(state: np.ndarray) -> dict:
    """What the student did."""
    rng = np.random.default_rng([1, state[0]])
    did = np.where(rng.random(len(state)) < 0.5, common(state), rng.integers(10_000, size=len(state)))
    said = '[{"role":"user","content":"' + "output " * 30 + '"}]'
    truncated = np.zeros(len(state), dtype=bool)
    return place(state) | {"action": texts(did), "truncated": truncated, "new_messages_json": [said] * len(state)}


def answers(state: np.ndarray) -> dict:
    """What three teachers did."""
    rng, size = np.random.default_rng([2, state[0]]), len(state) * len(TEACHERS)
    did = np.where(rng.random(size) < 0.6, np.repeat(common(state), len(TEACHERS)), rng.integers(10_000, size=size))
    where = {name: np.repeat(np.array(column), len(TEACHERS)) for name, column in place(state).items()}
    about = {"finish_reason": ["stop"] * size, "cost_usd": np.zeros(size), "model": ["m"] * size}
    return where | {"teacher": [*TEACHERS] * len(state), "action": texts(did)} | about


# --- the contenders


def vote(folder: Path) -> Find:
    """Pairs of all states, without what speaks for them."""
    rollouts = Run(folder / "rollouts")
    tasks = {row["task_id"]: Task(row["task_id"], "e", "s", row["family"], "") for row in rollouts.scan(TASK).rows()}
    with (
        tempfile.TemporaryDirectory() as spilled,
        AnsweredStates(rollouts, Run(folder / "answers"), Path(spilled)) as states,
        pq.ParquetWriter(folder / "vote.parquet", PAIR.schema) as file,
    ):
        for block in states.blocks():
            classes = block.classes_by_text()
            file.write_batch(pair_rows(block, classes, list(patterns(block, classes)), tasks)[0])
    rows = Scan(folder / "vote.parquet").rows(["rule", *OF_PAIRS])
    return lambda: (row for row in rows if row["rule"] == "majority_over_student")


def against(pairs: Iterable[Row]) -> str:
    """How many pairs are against the student, and a digest of them."""
    found = sorted("\t".join(row[name] for name in OF_PAIRS) for row in pairs)
    return f"{len(found)} pairs against the student, {store.digest(found)[:8]}"


def pandas(folder: Path) -> Find:
    """Joined and counted in memory."""
    import pandas as pd

    student = pd.read_parquet(folder / "rollouts/steps.parquet", columns=["state_sha256", "action"])
    said = pd.read_parquet(folder / "answers/teacher_actions.parquet", columns=["state_sha256", "action"])
    votes = said.groupby(["state_sha256", "action"], sort=False).size().rename("votes").reset_index()
    joined = votes[votes.votes > len(TEACHERS) / 2].merge(student, on="state_sha256", suffixes=("", "_student"))
    found = joined[joined.action != joined.action_student].rename(
        columns={"action": "chosen", "action_student": "rejected"}
    )
    found.to_parquet(folder / "pandas.parquet")
    return lambda: found.to_dict("records")


CONTENDERS = {"vote": vote, "pandas": pandas}

CASES = {"pairs": pairs}

if __name__ == "__main__":
    cases.main(__file__, CASES)
