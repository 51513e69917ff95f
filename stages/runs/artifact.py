"""A run as a stage sees it: `Run` is read, `RunWriter` is written, `Inputs` are the runs that a stage reads.

Stages open no file of a run by themselves.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, BinaryIO

from pyarrow import RecordBatch

from stages.errors import BadInput
from stages.runs import ledger, manifest, parquet, store
from stages.runs.journal import Journal
from stages.runs.manifest import InputRef
from stages.runs.parquet import Scan
from stages.runs.records import CHECKPOINT, KINDS, Kind, Row


class RunningTotals:
    """Mean reward, sampled tokens per second and cost of a run in progress, for progress lines and log backends.

    The mean is that of the newest training step, because each step has another policy; an evaluation has one mean per
    arm. The rate counts from this attempt's first progress on, so that a server's start does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._name = "mean reward"
        self._clock, self._began = clock, -1.0
        self.units, self.tokens, self._before = 0, 0, 0

    def begin(self) -> None:
        """Start the clock of the token rate; later calls have no effect."""
        if self._began < 0:
            self._began, self._before = self._clock(), self.tokens

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add one unit's payload: a rollout, an evaluation item, an answer, or the rollouts of a training step."""
        self.units += 1
        if "played" in payload:
            self._sums, self._name = {}, "reward of the last step"
            for played in payload["played"]:
                self._unit(played["rollout"], "reward", "reward", "completion_tokens")
        elif isinstance(rollout := payload.get("rollout"), Mapping):
            self._unit(rollout, "reward", "reward", "completion_tokens")
        elif isinstance(item := payload.get("item"), Mapping):
            self._name = "passed"
            self._unit(item, f"passed/{item.get('arm', '')}", "passed", "sampled_tokens")
        elif isinstance(answer := payload.get("answer"), Mapping):
            self.tokens += answer.get("completion_tokens") or 0

    def _unit(self, row: Mapping[str, Any], name: str, value: str, tokens: str) -> None:
        self.tokens += row.get(tokens) or 0
        if row.get(value) is not None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(row[value]), count + 1

    def pace(self) -> float:
        """Return the sampled tokens per second of this attempt; 0.0 before any."""
        seconds = self._clock() - self._began
        return (self.tokens - self._before) / seconds if self._began >= 0 and seconds > 0 else 0.0

    def figures(self, usd: float) -> dict[str, float]:
        """Return means by name, sampled tokens, their rate and the cost, as log backends take them."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return {**means, "sampled_tokens": self.tokens, "tokens_per_second": self.pace(), "cost_usd": usd}

    def text(self, usd: float) -> str:
        """Return `mean reward 0.412, 35 tokens a second, 0.03 USD`, without the parts that do not exist yet."""
        sums = list(self._sums.values())
        count = sum(number for _, number in sums)
        reward = [f"{self._name} {sum(total for total, _ in sums) / count:.3f}"] if count else []
        pace = [f"{self.pace():,.0f} tokens a second"] if self.pace() >= 0.5 else []
        return ", ".join([*reward, *pace, *([f"{usd:.4f} USD"] if usd else [])])


Listener = Callable[[str, int, int], None]
"""Called with (activity, units done, units in all), and with (a remark, 0, 0) between such calls."""


class Interrupted(Exception):
    """A signal asked the run to stop; finished units are saved. The exit code is 128 plus the signal's number."""

    signal_number: int = signal.SIGINT


class Run:
    """A finished run folder, read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.manifest = manifest.read_manifest(self.path)

    def holds(self, kind: Kind) -> str | None:
        """Return the name of the output of this kind, whatever its version; None when there is none."""
        return next(
            (name for name, out in self.manifest.outputs.items() if out["kind"].partition("/")[0] == kind.name), None
        )

    def rows(self, kind: Kind) -> list[Row]:
        """Read all rows of this kind (use `scan` for many); `BadInput` for a missing, damaged or newer table."""
        return list(self.scan(kind).rows())

    def scan(self, name: str | Kind) -> Scan:
        """Return a lazy table by its kind or name (`rollouts`, `rollout`); `BadInput` when there is none."""
        if isinstance(name, Kind):
            return parquet.scan_table(self.path / f"{self._name(name)}.parquet", name)
        for output, out in self.manifest.outputs.items():
            if name in (output, out["kind"].partition("/")[0]) and out["file"].endswith(".parquet"):
                return Scan(self.path / out["file"])
        held = [name for name, out in self.manifest.outputs.items() if out["file"].endswith(".parquet")]
        raise BadInput(f"{self.path} has no table {name!r}; it has {', '.join(held) or 'none'}.")

    def folder(self, kind: Kind = CHECKPOINT) -> Path:
        """Return the folder output of this kind (a checkpoint)."""
        return self.path / self._name(kind)

    def read_file(self, name: str) -> bytes | None:
        """Read a file of the run folder (`report.txt`, `metrics.jsonl`); None when it does not exist."""
        return store.read_bytes(self.path / name)

    def live(self) -> Row | None:
        """Return the newest state written by `RunWriter.live`, `at` in seconds since 1970; None without one."""
        path = self.path / "scratch" / "live" / "units.json"
        return store.read_json(path) if path.is_file() else None

    def units(self) -> Iterator[Row]:
        """Yield the last record of every unit, finished or failed; works on a run in progress, too."""
        return store.read_units(self.path / "steps")

    def _name(self, kind: Kind) -> str:
        name = self.holds(kind)
        if name is None:
            held = ", ".join(out["kind"] for out in self.manifest.outputs.values()) or "nothing"
            raise BadInput(
                f"{self.path} holds {held}, but {kind} is needed here. Give the run that holds it with --from."
            )
        return name

    def damage(self) -> str | None:
        """Compare the outputs on disk with the manifest; return the first difference in words, None without one."""
        for name, out in self.manifest.outputs.items():
            if not (self.path / out["file"]).exists():
                return f"{out['file']} is missing"
            if (
                out["kind"].partition("/")[0] != CHECKPOINT.name
                and store.file_sha256(self.path / out["file"]) != out["sha256"]
            ):
                return f"{name} has changed since it was written"
        return None


class RunWriter:
    """A run folder being written: finished units, tables, folders, counts, progress, and stop requests."""

    worker = False  # True in a worker process, which writes its share of the units
    found: Any = None  # in a worker: the value that the run passed to `spread`

    def __init__(
        self,
        path: Path,
        record: manifest.Manifest,
        *,
        cache: Path,
        max_cost: float | None = None,
        listener: Listener | None = None,
        spread: "Callable[[RunWriter, Sequence[Sequence[str]], str, Any], None] | None" = None,
    ) -> None:
        self.path, self.manifest, self.cache = path, record, cache
        self.budget = ledger.Budget(max_cost, path / ledger.NAME)
        self.stop = threading.Event()
        self._listen, self._spread = listener or (lambda what, done, total: None), spread
        self._lock = threading.Lock()
        self._attempted: set[str] = set()
        self._so_far = RunningTotals()
        self._follow: Callable[[Mapping[str, float], int], None] | None = None
        self.journal = Journal(path / "steps", look=self._so_far.add)

    def finished(self, unit: str) -> bool:
        """Return whether a unit is finished, in any attempt, or was tried by a worker in this attempt."""
        return unit in self._attempted or self.journal.finished(unit)

    def spread(self, blocks: Sequence[Sequence[str]], what: str, found: Any = None) -> None:
        """Let workers do the missing units with the stage's `work`; without workers do nothing.

        Units of one block depend on each other, so one worker does all missing units of a block. found: a picklable
        value that saves the workers a computation.
        """
        if self._spread:
            self._spread(self, blocks, what, found)

    def take_over(self, units: Sequence[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Write units that a worker has done."""
        self.write_all(units)
        self._attempted.update(unit for unit, _, _ in units)

    def write(self, unit: str, payload: Mapping[str, Any], *, failed: bool = False) -> None:
        """Write a unit durably; safe to call from several threads."""
        self.write_all([(unit, payload, failed)])

    def write_all(self, units: Iterable[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Write several (unit, payload, failed) durably in one step."""
        with self._lock:
            written = list(units)
            self.journal.append(written)
            for _, payload, _ in written:
                self._so_far.add(payload)
            if self._follow is not None:
                self._follow(self._so_far.figures(self.budget.spent), self._so_far.units)

    def records(self) -> Iterator[Row]:
        """Yield all units so far, finished and failed."""
        return self.journal.records()

    def table(self, kind: Kind, rows: Iterable[Row | RecordBatch], name: str | None = None) -> None:
        """Write a Parquet output; the rows of an iterator are never all in memory."""
        name = name or f"{kind.name}s"
        file = f"{name}.parquet"
        self.manifest.outputs[name] = {"file": file, **parquet.write_table(self.path / file, kind, rows)}

    def checkpoint(self, fill: Callable[[Path], None], name: str = "checkpoint") -> None:
        """Write a folder output atomically: `fill` writes into a temporary folder that is then renamed."""
        temporary, final = self.path / f".{name}.tmp", self.path / name
        rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        rmtree(final, ignore_errors=True)
        temporary.rename(final)
        content = store.folder_sha256(final)
        digests = {"sha256": content, "content_sha256": content}
        self.manifest.outputs[name] = {"file": name, "kind": str(CHECKPOINT), "rows": 1, **digests}

    def write_export(self, name: str, fill: Callable[[BinaryIO], int]) -> int:
        """Write an output in another program's format; `fill` writes it, without keys, and returns its records."""
        with store.sealing(self.path / name) as file:
            rows = fill(file)
        content = store.file_sha256(self.path / name)
        digests = {"sha256": content, "content_sha256": content}
        self.manifest.outputs[name] = {"file": name, "kind": "foreign/1", "rows": rows, **digests}
        return rows

    def document(self, name: str, value: Any) -> None:
        """Write a JSON document of the run (a report, a verdict)."""
        store.write_json(self.path / f"{name}.json", value)

    def text(self, name: str, value: str) -> None:
        """Write a text file of the run."""
        store.write_sealed(self.path / name, value.encode())

    def figure(self, name: str, data: bytes) -> None:
        """Write an image of the run."""
        store.write_sealed(self.path / name, data)

    def metrics(self, rows: Iterable[Row]) -> None:
        """Write `metrics.jsonl`."""
        store.write_sealed(self.path / "metrics.jsonl", b"".join(store.encode(row) + b"\n" for row in rows))

    def scratch(self, name: str) -> Path:
        """Return a folder for data that only a resumed attempt needs; it is removed when the run completes."""
        folder = self.path / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def live(self, rows: list[Row], done: int, total: int) -> None:
        """Write the state of unfinished units for `composer show --follow`; it is removed when the run completes."""
        state = {"at": time.time(), "done": done, "total": total, "units": rows}
        store.write_json(self.scratch("live") / "units.json", state)

    def count(self, **numbers: int) -> None:
        """Set named counts (planned, done, failed, dropped by reason) in the manifest."""
        self.manifest.counts.update({name: int(number) for name, number in numbers.items()})

    def set_summary(self, *, ok: bool | None = None, exit_code: int | None = None, **summary: Any) -> None:
        """Set the outcome of the run; later calls add to it.

        ok: whether the run passed its own checks. exit_code: the exit code of its verdict, if any. summary: the most
        important numbers.
        """
        outcome = self.manifest.outcome
        outcome.ok = outcome.ok if ok is None else ok
        outcome.code = outcome.code if exit_code is None else exit_code
        outcome.summary.update(summary)

    def model(self, role: str, **facts: Any) -> None:
        """Record a model of the run: its name, digests of weights, tokenizer and chat template."""
        self.manifest.models[role] = facts

    def progress(self, what: str, done: int, total: int) -> None:
        """Report progress to the listener; may be called often."""
        self._so_far.begin()
        self._listen(what, done, total)
        if remark := self._so_far.text(self.budget.spent):
            self._listen(remark, 0, 0)

    def follow(self, log: Callable[[Mapping[str, float], int], None] | None) -> None:
        """Call `log` with the running totals and the number of units after each write; None stops it."""
        self._follow = log

    def raise_if_stopped(self) -> None:
        """Raise `Interrupted` after a stop request; call it between units."""
        if self.stop.is_set():
            raise Interrupted


@dataclass(frozen=True)
class Slot:
    """One input of a stage: the kind it needs, whether several runs may fill it, and whether it may stay empty.

    `optional` lets it stay empty always, `unless` where a run was given that holds one of these kinds.
    """

    kind: Kind
    many: bool = False
    optional: bool = False
    unless: tuple[Kind, ...] = ()


class Inputs(dict[str, list[Run]]):
    """The runs of a stage by the name of the slot that they fill. A slot that stays empty is absent."""

    def __init__(self, given: Mapping[str, Run | Sequence[Run]] | None = None) -> None:
        super().__init__({name: [one] if isinstance(one, Run) else list(one) for name, one in (given or {}).items()})

    def one(self, slot: str) -> Run:
        """Return the only run of a slot; `KeyError` when it is empty."""
        (run,) = self[slot]
        return run

    def optional(self, slot: str) -> Run | None:
        """Return the only run of a slot, or None when it is empty."""
        return self.one(slot) if slot in self else None

    def many(self, slot: str) -> list[Run]:
        """Return all runs of a slot, an empty list when there is none."""
        return self.get(slot, [])

    def runs(self) -> Iterator[Run]:
        """Yield every run, slot by slot."""
        return (run for runs in self.values() for run in runs)


def input_refs(inputs: Inputs) -> dict[str, list[InputRef]]:
    """Return the manifest's entries of the inputs."""
    return {
        name: [
            InputRef(
                stage=r.manifest.stage, path=str(r.path), fingerprint=r.manifest.fingerprint, content=r.manifest.content
            )
            for r in runs
        ]
        for name, runs in inputs.items()
    }


def kinds_of(run: Run) -> list[Kind]:
    """Return the kinds of all outputs of a run that this program knows."""
    return [
        KINDS[out["kind"].partition("/")[0]]
        for out in run.manifest.outputs.values()
        if out["kind"].partition("/")[0] in KINDS
    ]
