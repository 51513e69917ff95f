"""A stage's units dealt to the workers of an engine: `--on processes:4`, `--on ray`.

A worker calls the stage's `work` with a `RunWriter` that lacks only the units of its shard and writes to a folder of
its own below the run's `scratch/shards`, which every worker can write to. The process that runs the stage merges the
finished units from there and then continues alone, so that a stage does not know where its units were done. A worker
that dies leaves what it finished: the next worker that gets the shard does the rest. Each shard reserves its money in
the run's own ledger, so that the limit holds over all workers and attempts.
"""

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from stages.backends.engine import Engine
from stages.errors import ComposerError, Incomplete
from stages.runs import ledger, store
from stages.runs.artifact import Inputs, Interrupted, Run, RunWriter
from stages.runs.config import StageConfig
from stages.runs.ledger import Reservation
from stages.runs.manifest import Manifest
from stages.runs.records import Row
from stages.runs.stage import load_stage

A_WORKER = 4
"""Shards for each worker: fewer lose time in the end, when some have nothing left to do; more cost their beginnings."""
STOP = "stop"
LOOK_S = 0.5


@dataclass(frozen=True)
class Shard:
    """What a worker is told. `lent`: USD that it may spend, None for no bound. `found`: as `RunWriter.found`."""

    stage: str
    inputs: dict[str, list[Path]]
    config: StageConfig
    units: frozenset[str]
    folder: Path
    cache: Path
    lent: float | None = None
    found: Any = None


class ShardWriter(RunWriter):
    """A run as a worker sees it: what is not of its shard, or was finished by a worker that died, is finished."""

    worker = True

    def __init__(self, shard: Shard) -> None:
        attempts = [path for path in shard.folder.iterdir() if path.is_dir()] if shard.folder.exists() else []
        lent = None if shard.lent is None else max(shard.lent - sum(_money(attempts)), 0.0)
        record = Manifest(composer="", stage=shard.stage, stage_version=load_stage(shard.stage).version, fingerprint="")
        super().__init__(shard.folder / uuid4().hex, record, cache=shard.cache, max_cost=lent)
        self.found = shard.found
        self._missing = shard.units - {row["unit"] for row in _units(attempts) if not row["failed"]}

    def finished(self, unit: str) -> bool:
        """Whether a unit is none of this worker's, or is finished."""
        return unit not in self._missing or super().finished(unit)


class Spread:
    """How the units of one run reach workers, and what came of them this process; without an engine only the latter."""

    def __init__(self, engine: Engine | None, stage: str, inputs: Inputs, config: StageConfig) -> None:
        self._engine, self._stage, self._config = engine, stage, config
        self._held: dict[str, Reservation] = {}
        self._inputs = {name: [run.path for run in runs] for name, runs in inputs.items()}

    def __call__(self, out: RunWriter, blocks: Sequence[Sequence[str]], what: str, found: Any = None) -> None:
        """Have the blocks of units done of which any is missing, each block by one worker.

        Raises what a worker raised, once the others have stopped; nothing more is begun then. Where the money for a
        shard did not suffice, what others gave back is lent again, as long as anything comes of it; what is missing
        then is for the caller.
        """
        folder = out.path / "scratch" / "shards"
        for left in folder.iterdir() if folder.exists() else ():  # by an attempt that was killed
            _take_over(left, out, out.budget.take_up(shard=left.name)) if left.is_dir() else left.unlink()
        if self._engine is None:
            return
        folder, total = out.scratch("shards"), sum(map(len, blocks))
        while missing := [block for block in blocks if not all(map(out.finished, block))]:
            errors = list[BaseException]()
            shards = self._shards(self._engine, missing, folder, errors, out, found)
            with _told_to_stop(lambda: bool(errors) or out.stop.is_set(), folder):  # noqa: B023 - this round's
                for shard, error in self._engine.map(work, shards):
                    _take_over(shard.folder, out, self._held.pop(shard.folder.name))
                    if error is not None and (out.budget.limit is None or not isinstance(error, Incomplete)):
                        errors.append(error)
                    out.progress(what, sum(out.finished(unit) for block in blocks for unit in block), total)
            out.raise_if_stopped()
            if errors:
                raise errors[0]
            if sum(not all(map(out.finished, block)) for block in blocks) == len(missing):
                return

    def _shards(
        self,
        engine: Engine,
        blocks: Sequence[Sequence[str]],
        folder: Path,
        errors: Sequence[BaseException],
        out: RunWriter,
        found: Any,
    ) -> Iterator[Shard]:
        """Neighbouring blocks together, until there are errors. Each gets an equal part of the money not lent yet."""
        size = max(1, len(blocks) // (engine.workers * A_WORKER))
        shards = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        for number, shard in enumerate(shards):
            units = frozenset(unit for block in shard for unit in block if not out.finished(unit))
            name, lent = store.digest(sorted(units))[:16], None
            if out.budget.limit is not None:
                others = min(engine.workers, len(self._held) + len(shards) - number) - len(self._held)
                lent = out.budget.left / max(others, 1) * (1 - ledger.ROUNDING)
            if errors or out.stop.is_set() or lent == 0 or (held := out.budget.hold(lent, shard=name)) is None:
                return
            out.budget.write([held.line])
            self._held[name] = held
            yield Shard(self._stage, self._inputs, self._config, units, folder / name, out.cache, lent, found)


def work(shard: Shard) -> BaseException | None:
    """Do a shard's units, in a worker; what went wrong, if anything did. What is finished is durable in any case."""
    inputs = Inputs({name: [Run(path) for path in paths] for name, paths in shard.inputs.items()})
    stage = load_stage(shard.stage)
    try:
        out = ShardWriter(shard)
        with _listening(out, shard.folder.parent / STOP):
            if stage.work is not None:
                stage.work(inputs, shard.config, out)
    except Interrupted:
        return None
    except ComposerError as error:
        return error
    except Exception as error:
        told = RuntimeError(repr(error))
        told.add_note(f"In a worker:\n{traceback.format_exc()}")
        return told
    return None


@contextmanager
def _told_to_stop(asked: Callable[[], bool], folder: Path) -> Iterator[None]:
    """Workers stop between units when they are asked to: a file says so, since they may be on other machines."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(LOOK_S):
            if asked():
                (folder / STOP).touch()
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        (folder / STOP).unlink(missing_ok=True)


@contextmanager
def _listening(out: RunWriter, path: Path) -> Iterator[None]:
    ended = threading.Event()

    def listen() -> None:
        while not ended.wait(LOOK_S):
            if path.exists():
                out.stop.set()
                return

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _take_over(folder: Path, out: RunWriter, held: Reservation | None) -> None:
    """Make durable what the workers of a shard finished and what they spent, then delete their folder."""
    attempts = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    done: dict[str, Row] = {}
    for row in _units(attempts):
        if row["unit"] not in done or done[row["unit"]]["failed"]:
            done[row["unit"]] = row
    out.take_over([(row.pop("unit"), row, row.pop("failed")) for row in done.values()])
    if held is not None:  # else an attempt was killed after this line
        spent, possibly = _money(attempts)
        out.budget.write([{"call": held.call, "settled": spent, "possibly": possibly}])
    rmtree(folder, ignore_errors=True)


def _units(attempts: Sequence[Path]) -> Iterator[Row]:
    return (row for attempt in attempts for row in store.read_units(attempt / "steps"))


def _money(attempts: Sequence[Path]) -> tuple[float, float]:
    """USD spent and possibly paid."""
    totals = [total for attempt in attempts if (total := ledger.totals(attempt))]
    return sum(spent for spent, _ in totals), sum(possibly for _, possibly in totals)
