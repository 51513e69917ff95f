"""Stages in processes of their own, killed with SIGKILL at random moments and resumed until they end.

The processes are forked by a server that has imported what is heavy, so that a kill costs no import.
"""

import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.config import StageConfig
from stages.runs.stage import assign_inputs, load_stage

HEAVY = ["stages.training.report", "stages.probe.checks.validation", "duckdb", "scipy.stats", "openai"]
PATIENCE_S = 240
OTHER = {"manifest.json", "ledger.jsonl", ".lock"}
"""Files that say when and how often a run was begun, and in what order calls were paid for."""
TIMED = {"metrics.jsonl", "report.txt"}
"""Files that hold measured seconds where the stage measures some: compared but for those stages."""
TIMED_STEP = ".diag.json"
"""How the names of files end that say how long a step took."""
MEASURING = {"collect", "replay-teachers", "evaluate", "train", "substrates", "probe-replay"}


@dataclass(frozen=True)
class Work:
    """A stage with what it reads and its settings. in_flight: paid calls that may be on their way at once."""

    stage: str
    config: StageConfig
    reads: Sequence[Run] = ()
    in_flight: int = 0
    max_cost: float | None = None

    def carry_out(self, root: Path) -> None:
        """Begin or go on, to the end."""
        given = assign_inputs(load_stage(self.stage), self.reads)
        runner.execute(self.stage, given, self.config, root=root, resume=True, max_cost=self.max_cost)

    def start(self, root: Path) -> BaseProcess:
        """The same in a process, which has begun when this returns."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        before = self.attempts(root)
        process = context.Process(target=self.carry_out, args=(root,))
        process.start()
        deadline = time.monotonic() + PATIENCE_S
        while self.attempts(root) == before and process.is_alive():
            assert time.monotonic() < deadline, f"{self.stage} does not begin"
            time.sleep(0.002)
        return process

    def finish(self, root: Path) -> float:
        """Carry it out in a process and return how many seconds it took after its start."""
        process, began = self.start(root), time.monotonic()
        process.join(PATIENCE_S)
        assert process.exitcode == 0, f"{self.stage} ended with {process.exitcode}"
        return time.monotonic() - began

    def folder(self, root: Path) -> Path | None:
        """The folder of its run, if there is one yet."""
        return next((path.parent for path in root.glob(f"{self.stage}/2*/manifest.json")), None)

    def attempts(self, root: Path) -> int:
        """How often it was begun."""
        folder = self.folder(root)
        return 0 if folder is None else json.loads((folder / "manifest.json").read_bytes())["attempts"]

    def artifacts(self, root: Path) -> dict[str, Any]:
        """The content of all outputs, and the bytes of every other file that says no time."""
        folder = self.folder(root)
        assert folder is not None
        run = Run(folder)
        assert run.manifest.status == "complete" and not run.damage()
        left_out = OTHER | (TIMED if self.stage in MEASURING else set())
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".parquet" and path.name not in left_out
            if not path.name.endswith(TIMED_STEP)
            if path.relative_to(folder).parts[0] not in ("steps", "logs")
        }
        return {"content": {name: out["content_sha256"] for name, out in run.manifest.outputs.items()}, **files}


def kill_at_random(work: Work, root: Path, kills: int, lasts_s: float, seed: int) -> list[int]:
    """Kill the work so many times, begun anew wherever it ends before, and end it; the kills of each of these runs.

    The runs lie in `root/0`, `root/1` and so on. lasts_s: how long it takes undisturbed.
    """
    moment, done = random.Random(seed), [0]
    while sum(done) < kills:
        at = root / str(len(done) - 1)
        process = work.start(at)
        process.join(moment.uniform(0, lasts_s))
        if process.exitcode is None:
            process.kill()
            process.join()
            done[-1] += 1
        else:
            assert process.exitcode == 0, f"{work.stage} ended with {process.exitcode}"
            assert len(done) < 10 * kills, f"{work.stage} always ends before it can be killed"
            done.append(0)
    if done[-1] or not (root / str(len(done) - 1)).exists():
        work.finish(root / str(len(done) - 1))
    return done


def paid(root: Path) -> float:
    """What all runs below say that they paid, or possibly paid, in USD."""
    found = [json.loads(path.read_bytes()) for path in root.glob("*/*/2*/manifest.json")]
    return sum(run["cost_usd"] + run["possibly_usd"] for run in found)


def forget(root: Path) -> None:
    """Delete runs that have been compared."""
    shutil.rmtree(root, ignore_errors=True)
