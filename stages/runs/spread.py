"""A stage's units dealt to the workers of an engine: `--on processes:4`, `--on ray`.

A worker calls the stage's `work` with a `RunWriter` that lacks only the units of its shard and writes to a folder of
its own below the run's `scratch/shards`, which every worker can write to. The process that runs the stage merges the
finished units from there and then continues alone, so that a stage does not know where its units were done. A worker
that dies leaves its finished units: the next worker that gets the shard does the rest. Each shard reserves its money in
the run's own ledger, so that the limit holds over all workers and attempts.
"""

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from composer_stages.backends.engine import Engine
from composer_stages.errors import ComposerError, Incomplete
from composer_stages.runs import ledger, store
from composer_stages.runs.activity import repeating
from composer_stages.runs.kinds import Row
from composer_stages.runs.ledger import Budget, Reservation
from composer_stages.runs.run import AnswerFolders, Inputs, Manifest, Run, RunWriter
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import load_stage
from composer_stages.stopping import Interrupted, stopped_by

SHARDS_PER_WORKER = 4
"""More shards leave fewer workers idle at the end, but each pays once for loading the stage."""
STOP = "stop"
"""The file that tells workers to stop; a file, since they may be on other machines."""
POLL_S = 0.5
"""Seconds between two looks of a worker at the stop file."""
DONE = "done"
"""The file of a shard to which its workers add a byte for each unit that they write."""
TELL_S = 2.0
"""Seconds between two reports of progress."""


@dataclass(frozen=True)
class Shard:
    """The job of a worker. `lent`: USD that it may spend, None for no bound. `shared_value`: as `RunWriter` has it."""

    stage: str
    inputs: dict[str, list[Path]]
    config: StageConfig
    units: frozenset[str]
    folder: Path
    cache: AnswerFolders
    lent: float | None = None
    shared_value: Any = None


class ShardWriter(RunWriter):
    """A run as a worker sees it: units of other shards count as finished, and those of a worker that died."""

    worker = True

    def __init__(self, shard: Shard) -> None:
        units, paid = _shard_results(shard.folder)
        lent = None if shard.lent is None else max(shard.lent - (paid.spent + paid.possibly), 0.0)
        record = Manifest(composer="", stage=shard.stage, stage_version=load_stage(shard.stage).version, fingerprint="")
        # A folder of this process alone: a worker that was declared dead may still be writing into its own.
        super().__init__(shard.folder / uuid4().hex, record, cache=shard.cache.shared, max_cost=lent)
        self.cache = shard.cache  # the run's own: this folder is deleted once its units are merged
        self.shared_value = shard.shared_value
        self._missing = shard.units - {unit for unit, row in units.items() if not row["failed"]}

    def finished(self, unit: str) -> bool:
        """Return whether a unit belongs to another shard, or is finished."""
        return unit not in self._missing or super().finished(unit)

    def write_all(self, units: Iterable[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Write several (unit, payload, failed) durably in one step, and let the run's process know how many."""
        written = list(units)
        super().write_all(written)
        with open(self.path.parent / DONE, "ab") as file:
            file.write(bytes(len(written)))


@dataclass(eq=False)
class ShardScheduler:
    """Deals the units of one run to workers, and merges their results; without an engine it only merges."""

    engine: Engine | None
    stage: str
    inputs: Inputs
    config: StageConfig
    _held: dict[str, Reservation] = field(default_factory=dict)
    """The money of each shard that is under way, by the name of its folder."""

    def __call__(self, out: RunWriter, blocks: Sequence[Sequence[str]], noun: str, shared_value: Any = None) -> None:
        """Let workers do the blocks of units of which any is missing, each block by one worker.

        Raises what a worker raised, once the others have stopped; no further shard is begun then. Where the money for a
        shard did not suffice, what other shards gave back is lent again, as long as that finishes any block; the caller
        does what is missing then.
        """
        folder = out.path / "scratch" / "shards"
        for path in folder.iterdir() if folder.exists() else ():  # of an attempt that was killed
            if path.is_dir():
                _merge(path, out, out.budget.take_up(shard=path.name))
            else:
                path.unlink()
        if self.engine is None:
            return
        folder, total = out.scratch("shards"), sum(map(len, blocks))
        while missing := [block for block in blocks if not all(map(out.finished, block))]:
            errors, told_at = list[BaseException](), -TELL_S

            def waiting() -> None:
                nonlocal told_at
                if errors or out.stop.is_set():  # noqa: B023 - this round's
                    (folder / STOP).touch()
                if time.monotonic() - told_at >= TELL_S:
                    told_at = time.monotonic()
                    done = sum(out.finished(unit) for block in blocks for unit in block)
                    done += sum(len(store.read_bytes(folder / name / DONE) or b"") for name in self._held)
                    out.progress(noun, min(done, total), total)

            shards = self._shards(self.engine, missing, folder, errors, out, shared_value)
            try:
                for shard, error in self.engine.map(work, shards, waiting):
                    _merge(shard.folder, out, self._held.pop(shard.folder.name))
                    # Under a limit, Incomplete ends one shard's loan: the next round lends what others gave back.
                    if error is not None and (out.budget.limit is None or not isinstance(error, Incomplete)):
                        errors.append(error)
                    told_at = -TELL_S
                waiting()
            finally:
                (folder / STOP).unlink(missing_ok=True)
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
        shared_value: Any,
    ) -> Iterator[Shard]:
        """Yield shards of neighbouring blocks until there are errors; each reserves an equal part of the money."""
        inputs = {name: [run.path for run in runs] for name, runs in self.inputs.items()}
        size = max(1, len(blocks) // (engine.workers * SHARDS_PER_WORKER))
        shards = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        for number, shard in enumerate(shards):
            units = frozenset(unit for block in shard for unit in block if not out.finished(unit))
            # Named by content, so that a resumed attempt finds the reservation and the units of the same shard.
            name, lent = store.digest(sorted(units))[:16], None
            if out.budget.limit is not None:
                lenders = min(engine.workers, len(self._held) + len(shards) - number) - len(self._held)
                lent = out.budget.left / max(lenders, 1) * (1 - ledger.ROUNDING)
            if errors or out.stop.is_set() or lent == 0 or (reservation := out.budget.hold(lent, shard=name)) is None:
                return
            out.budget.write([reservation.line])  # before the worker can spend it
            self._held[name] = reservation
            yield Shard(self.stage, inputs, self.config, units, folder / name, out.cache, lent, shared_value)


def work(shard: Shard) -> BaseException | None:
    """Do a shard's units in a worker and return the error, if any. What is finished is durable in any case."""
    inputs = Inputs({name: [Run(path) for path in paths] for name, paths in shard.inputs.items()})
    stage = load_stage(shard.stage)
    try:
        out = ShardWriter(shard)

        def look() -> None:
            if (shard.folder.parent / STOP).exists():
                out.stop.set()

        with repeating(look, POLL_S), stopped_by(out.stop):
            if stage.work is not None:
                stage.work(inputs, shard.config, out)
    except Interrupted:
        return None
    except ComposerError as error:
        return error
    except Exception as error:
        # Another exception may not be picklable, and its traceback would be lost on the way to the main process.
        replacement = RuntimeError(repr(error))
        replacement.add_note(f"In a worker:\n{traceback.format_exc()}")
        return replacement
    return None


def _merge(folder: Path, out: RunWriter, reservation: Reservation | None) -> None:
    """Make durable what the workers of a shard finished and spent, then delete the shard's folder."""
    done, paid = _shard_results(folder)
    out.write_all([(row.pop("unit"), row, row.pop("failed")) for row in done.values()])
    out.attempted.update(done)
    if reservation is not None:  # None: an attempt settled it, and was killed before it deleted the folder
        line: Row = {"call": reservation.call, "settled": paid.spent, "possibly": paid.possibly}
        if paid.understated:
            claimed = max(paid.spent - paid.understated_usd, 0.0)
            line |= {"claimed": claimed, "understated": paid.understated}
        out.budget.write([line])
    rmtree(folder, ignore_errors=True)


def _shard_results(folder: Path) -> tuple[dict[str, Row], Budget]:
    """Return what all workers of a shard did: units by name, and the sums of their ledgers."""
    attempts = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    units: dict[str, Row] = {}
    for row in (row for attempt in attempts for row in store.read_units(attempt / "steps")):
        if row["unit"] not in units or units[row["unit"]]["failed"]:  # a success counts, whichever came last
            units[row["unit"]] = row
    paid = Budget()
    for budget in filter(None, map(ledger.read, attempts)):
        paid.add(budget)
    return units, paid
