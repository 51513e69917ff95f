"""The folder of a run: find the folder, read its manifest, open its files (`Run`), and write them (`RunWriter`).

Stages open no file of a run by themselves; `Inputs` are the runs that a stage reads. Which file holds what is decided
here, and how bytes become durable in `composer_stages.runs.store`:

    manifest.json    everything that was asked, read, used, produced and spent, readable without the program
    config.json      the settings, to be given to the same stage again
    NAME.parquet     a table (`composer_stages.runs.tables`); a folder NAME is a checkpoint
    steps/           the finished units (`composer_stages.runs.store`)
    ledger.jsonl     the money (`composer_stages.runs.ledger`)
    logs/, scratch/  tracebacks and log backends; data that only a resumed attempt needs

A complete run's manifest has the size and the SHA-256 of every file but the ledger, logs and scratch, and every
manifest a digest of itself, so that damage is noticed and named (`Run.damage`).
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_stages.errors import BadInput, ComposerError, UsageError, not_a_folder, refusal
from composer_stages.layout import Sparkline, escape_control_characters
from composer_stages.redaction import redacted_value
from composer_stages.runs import display, ledger, store
from composer_stages.runs.activity import Figures, Notice
from composer_stages.runs.kinds import CHECKPOINT, Kind, Row
from composer_stages.runs.store import Journal
from composer_stages.stopping import Interrupted
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from composer_stages.runs.tables import Scan  # with Arrow, which a command that is refused does not wait for

Status = Literal["running", "complete", "incomplete", "interrupted", "failed"]
PACKAGES = ("torch", "transformers", "trl", "pyarrow", "duckdb", "openai")
UNSEALED = ("manifest.json", ledger.NAME, "owner.json", "logs", "scratch")
"""Files and folders whose digests are not in the manifest of a complete run: they are written after it, or not sent
to a bucket with the rest (`composer_stages.runs.bucket`)."""
SMALL_BYTES = 64 * 1024
"""Size up to which a document in a run's folder is read whenever the run is listed."""
CALLS = "paid_calls"
"""Key of a unit in the journal: how many calls the run's ledger held when the unit was written."""
Check = Literal["sizes", "tables", "bytes"]
SOURCE = Path(__file__).resolve().parents[2]
REPORT, REPORT_LINES = "report.txt", "report-lines"
"""The report of a run; and the document with its lines but that of the judgement, of stages that judge their runs."""


class InputRef(BaseModel):
    """One upstream run that was read: its folder, its stage, and the content digest that identifies it."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    path: str
    fingerprint: str
    content: str


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run: whether it passed (None where that is open), its exit code, and its line in `report.txt`.

    summary: what it adds to the manifest's summary.
    """

    ok: bool | None
    exit_code: int
    line: str
    summary: Mapping[str, Any]


def render_report(lines: Mapping[str, Sequence[str]], judgement: str) -> str:
    """Return the text of a report from its lines (`RunWriter.write_report`) and the line of the judgement."""
    return "\n".join([*lines["before"], judgement, *lines["after"]]) + "\n"


class RunOutcome(BaseModel):
    """The result of a stage. `ok` is None where it judges nothing; `code` is the exit code of its verdict, if any."""

    model_config = ConfigDict(extra="forbid")
    ok: bool | None = None
    code: int | None = None
    summary: dict[str, Any] = {}

    @property
    def exit_code(self) -> int:
        """Return the exit code that the stage chose, else 1 when the stage judged itself not ok."""
        return int(self.ok is False) if self.code is None else self.code

    def judged(self, judgement: Judgement) -> "RunOutcome":
        """Return the outcome by another verdict; the line of the report is kept with it."""
        summary = {**self.summary, **judgement.summary, "judgement": judgement.line}
        return RunOutcome(ok=judgement.ok, code=judgement.exit_code, summary=summary)


class SealedFile(BaseModel):
    """The size and the digest of a file of a complete run."""

    model_config = ConfigDict(extra="forbid")
    bytes: int
    sha256: str


class RunFacts(BaseModel):
    """The fields of a manifest that lists of runs show (`composer_stages.runs.index`)."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    stage_version: int
    fingerprint: str
    status: Status = "running"
    label: str = ""
    reason: str = ""
    started_at: str = ""
    seconds: float = 0.0
    device: str = ""
    """Where the newest attempt runs or ran: "cpu", "GPU 0, 1" as CUDA_VISIBLE_DEVICES names them; empty: not known."""
    config: dict[str, Any] = {}
    inputs: dict[str, list[InputRef]] = {}
    counts: dict[str, int] = {}
    cost_usd: float = 0.0
    outcome: RunOutcome = Field(default_factory=RunOutcome)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the most important numbers, as `RunWriter.set_summary` set them."""
        return self.outcome.summary


class Manifest(RunFacts):
    """`manifest.json` of a run folder. Its status flips last, so a folder without `complete` is not finished."""

    composer: str
    finished_at: str = ""
    attempts: int = 0
    identity: dict[str, Any] = {}
    outputs: dict[str, dict[str, Any]] = {}
    tokens: dict[str, int] = {}
    possibly_usd: float = 0.0
    models: dict[str, Any] = {}
    packages: dict[str, str] = {}
    python: str = platform.python_version()
    code: dict[str, str | None] = {}
    files: dict[str, SealedFile] = {}
    seal: str = ""
    """The SHA-256 of all other fields."""

    @model_validator(mode="after")
    def _check_names(self) -> "Manifest":
        # A run may come from anyone, and these names are joined to its folder.
        for name in [*self.files, *self.outputs, *(str(out.get("file")) for out in self.outputs.values())]:
            if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
                raise ValueError(Sentence("runs.file-outside-run", name=name))
        return self

    @property
    def content(self) -> str:
        """Return a digest of the outputs' content: equal for two runs that produced the same rows."""
        return store.digest({name: out["content_sha256"] for name, out in self.outputs.items()})


def find_folder(stage_folder: Path, label: str, fingerprint: str, out: Path | None) -> tuple[Path, bool]:
    """Return the folder for a fingerprint and whether it holds a run; `out` is the folder that a user chose, if any."""
    if out is not None:
        if out.exists() and not out.is_dir():
            raise not_a_folder(out, "out")
        existing = (out / "manifest.json").exists()
        if not existing and out.exists() and any(out.iterdir()):
            raise UsageError("runs.folder-not-empty", out=out)
        return out, existing
    # A folder without a manifest holds no run: its process was killed before the manifest was first written.
    same = sorted(p for p in stage_folder.glob(f"*-{fingerprint[:6]}") if (p / "manifest.json").exists())
    complete = []
    for path in same:
        with suppress(BadInput):
            complete += [path] if read_manifest(path).status == "complete" else []
    if same:
        return (complete or same)[-1], True
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")  # folder names sort by time
    return stage_folder / f"{stamp}-{store.folder_name(label)}-{fingerprint[:6]}", False


def without_time(name: str) -> str:
    """Return the name of a run folder without the time that `find_folder` puts before it; other names as they are."""
    return re.sub(r"^\d{8}T\d{6}Z-", "", name)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run folder; `BadInput` when there is none or it cannot be understood."""
    if not (folder / "manifest.json").is_file():
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise BadInput("runs.model-instead-of-run", folder=folder)
        raise BadInput("runs.no-manifest", folder=folder)
    fields = store.read_json(folder / "manifest.json")
    if isinstance(fields, dict) and fields.get("seal") != manifest_seal(fields):
        raise BadInput("runs.manifest-changed", folder=folder)
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadInput("runs.manifest-unreadable", folder=folder, field=field, refusal=refusal(first)) from None
    # The manifest gets the cost when an attempt ends. A killed process never wrote it; only the ledger has the money.
    if manifest.status == "running" and (spent := ledger.totals(folder)) is not None:
        manifest.cost_usd, manifest.possibly_usd = spent
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a run folder atomically, with its seal."""
    # Without keys before the seal is computed: `write_json` redacts what it writes.
    fields = redacted_value(manifest.model_dump(mode="json"))
    manifest.seal = manifest_seal(fields)
    store.write_json(folder / "manifest.json", {**fields, "seal": manifest.seal})


def manifest_seal(fields: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's fields without `seal`."""
    return store.digest({name: value for name, value in fields.items() if name != "seal"})


# Cached: git takes 35 ms a call, and the modules of this process are those of its start.
@functools.cache
def program_versions() -> tuple[dict[str, str], dict[str, str | None]]:
    """Return the versions of packages that can change results, and of this program's code.

    The latter is the commit and a digest of uncommitted changes; both are None outside a git checkout.
    """
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    outputs: list[str | None] = []
    for arguments in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
        try:
            done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):  # git is not installed, or its file system hangs
            outputs.append(None)
        else:
            outputs.append(done.stdout if done.returncode == 0 else None)
    commit, diff = outputs
    dirty = hashlib.sha256(diff.encode()).hexdigest() if diff else None
    return packages, {"commit": commit and commit.strip(), "dirty_sha256": dirty}


class Run:
    """A finished run folder, read-only; `live` and `units` work on a run in progress, too."""

    path: Path
    """The folder, absolute."""
    manifest: Manifest
    """What was asked, read, produced and spent: `status`, `reason`, `config`, `counts`, `summary`, `cost_usd`."""

    def __init__(self, path: Path | str, manifest: Manifest | None = None) -> None:
        """Open a run folder. manifest: its own, where it was read before."""
        self.path = store.require_text(Path(path).resolve())
        self.manifest = manifest or read_manifest(self.path)

    def __repr__(self) -> str:
        return repr(display.of_run(self))

    def _repr_html_(self) -> str:
        return display.of_run(self)._repr_html_()

    def holds(self, kind: Kind) -> str | None:
        """Return the name of the output of this kind, in any version; None when there is none."""
        return next(
            (name for name, out in self.manifest.outputs.items() if out["kind"].partition("/")[0] == kind.name), None
        )

    def tables(self) -> dict[str, Path]:
        """Return the Parquet file of each table by the name of the output; a file may have been deleted."""
        outputs = self.manifest.outputs.items()
        return {name: self.path / out["file"] for name, out in outputs if out["file"].endswith(".parquet")}

    def scan(self, name: str | Kind) -> "Scan":
        """Return a lazy table by its kind or name (`rollouts`, `rollout`); `BadInput` when there is none."""
        from composer_stages.runs.tables import Scan, scan_table

        if isinstance(name, Kind):
            path = self.folder(name)  # an output of this name; a table's file has a suffix
            return scan_table(path.with_name(f"{path.name}.parquet"), name)
        named = self.tables()
        for output, path in named.items():
            if name in (output, self.manifest.outputs[output]["kind"].partition("/")[0]):
                return Scan(path)
        raise BadInput("runs.no-table", path=self.path, name=name, tables=", ".join(named) or "none")

    def rows(self, kind: Kind) -> list[Row]:
        """Read all rows of this kind (use `scan` for many); `BadInput` for a missing, damaged or newer table."""
        return list(self.scan(kind).rows())

    def folder(self, kind: Kind = CHECKPOINT) -> Path:
        """Return the folder output of this kind (a checkpoint); `BadInput` when there is none."""
        name = self.holds(kind)
        if name is None:
            tables = ", ".join(self.manifest.outputs) or "nothing"
            raise BadInput("runs.table-of-other-kind", path=self.path, held=tables, plural=kind.plural)
        return self.path / name

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

    def damage(self, check: "Check" = "tables") -> str | None:
        """Compare the files with their digests in the manifest; return the first difference in words, None without one.

        check: "sizes" compares sizes, and the content of small documents; "tables" the content of all files but
        checkpoints and units, which may hold gigabytes; "bytes" that of every file, and the lines of the ledger.
        """
        if check == "bytes" and (damage := ledger.damage(self.path)):
            return damage  # it grows with every attempt, so that its lines have check values of their own
        large = tuple(f"{out['file']}/" for out in self.manifest.outputs.values())  # where it is a folder
        for name, sealed in self.manifest.files.items():
            path = f"{self.path}/{name}"  # no `Path`, which takes longer than looking at the file: a list has many
            if not os.path.isfile(path):
                return f"{name} is missing"
            if (size := os.path.getsize(path)) != sealed.bytes:
                return Sentence("runs.file-size-changed", name=name, size=size, bytes=sealed.bytes)
            is_small = sealed.bytes <= SMALL_BYTES and "/" not in name
            is_read = is_small or check == "bytes" or (check == "tables" and not name.startswith(("steps/", *large)))
            if is_read and store.file_sha256(path) != sealed.sha256:
                return Sentence("runs.file-changed", name=name)
        return None


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

    def __init__(self, runs: Mapping[str, Run | Sequence[Run]] | None = None) -> None:
        super().__init__(
            {name: [value] if isinstance(value, Run) else list(value) for name, value in (runs or {}).items()}
        )

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

    def refs(self) -> dict[str, list[InputRef]]:
        """Return the manifest's entries of the inputs."""
        return {
            name: [
                InputRef(stage=m.stage, path=str(run.path), fingerprint=m.fingerprint, content=m.content)
                for run in runs
                for m in [run.manifest]
            ]
            for name, runs in self.items()
        }


Listener = Callable[[str, int, int], None]
"""Called with (activity, units done, units in all), and with (a remark, 0, 0) between such calls."""


DRAWN = "drawn"
"""The folder in `scratch` of what later attempts must find alike: a digest of the tasks, versions of the models."""
OF_VERSION = ("revision", "tokenizer_sha256", "chat_template_sha256")
"""Facts about a model that differ where it is another version."""
ANSWERS = "answers"
"""The folder in `scratch` of a run's own answers."""


@dataclass(frozen=True)
class AnswerFolders:
    """Where answers of servers are kept: `shared` by all runs those that cost money, in `run` those of one run.

    What costs nothing is asked again by every other run: behind the same address and name may be another model by then.
    fresh: nothing that other runs bought is taken.
    """

    shared: Path
    run: Path
    fresh: bool = False


class RunWriter:
    """A run folder being written: finished units, tables, folders, counts, progress, and stop requests."""

    worker = False  # True in a worker process, which writes its share of the units
    shared_value: Any = None  # in a worker: the value that the run passed to `spread`

    def __init__(
        self,
        path: Path,
        record: Manifest,
        *,
        cache: Path,
        max_cost: float | None = None,
        fresh: bool = False,
        listener: Listener | None = None,
        spread: "Callable[[RunWriter, Sequence[Sequence[str]], str, Any], None] | None" = None,
    ) -> None:
        self.path, self.manifest = path, record
        self.cache = AnswerFolders(cache, path / "scratch" / ANSWERS, fresh)
        self.budget = ledger.Budget(max_cost, path / ledger.NAME)
        self.stop = threading.Event()
        self.attempted: set[str] = set()
        """Units that workers did in this attempt. One that failed there is tried again by the next attempt only."""
        self.follow: Callable[[Mapping[str, float], int], None] | None = None
        """Called with the running totals and the number of units after each write."""
        self._listen, self._spread = listener or (lambda text, done, total: None), spread
        self._lock = threading.Lock()
        self._exported: set[str] = set()
        self._digests: dict[str, str] = {}
        """The SHA-256 of files of this attempt, by name, so that a checkpoint is not read twice."""
        self._so_far = RunningTotals()
        self._calls = 0
        """The calls that the ledger held when the newest unit of earlier attempts was written."""
        self.journal = Journal(path / "steps", look=self._look)

    def _look(self, unit: Row) -> None:
        self._so_far.add(unit)
        self._calls = max(self._calls, unit.get(CALLS, 0))

    def require_whole_ledger(self) -> None:
        """Say so where the ledger lacks calls that were made before the newest unit; `BadInput` under a limit."""
        if (missing := self._calls - self.budget.recorded) <= 0:
            return
        sentence = Sentence("runs.ledger-missing-lines", path=self.budget.path, missing=missing)
        if self.budget.limit is not None:
            raise BadInput("runs.ledger-incomplete", sentence=sentence)
        self.budget.calls = self._calls  # numbers are not given twice
        self.set_summary(calls_missing_in_ledger=missing)
        self.progress(Notice(Sentence("runs.understated-bills", sentence=sentence)), 0, 0)

    def finished(self, unit: str) -> bool:
        """Return whether a unit is finished, in any attempt, or was tried by a worker in this attempt."""
        return unit in self.attempted or self.journal.finished(unit)

    def spread(self, blocks: Sequence[Sequence[str]], noun: str, shared_value: Any = None) -> None:
        """Let workers do the missing units with the stage's `work`; without workers do nothing.

        Units of one block depend on each other, so one worker does all missing units of a block. shared_value: a
        picklable value that saves the workers a computation.
        """
        if self._spread:
            self._spread(self, blocks, noun, shared_value)

    def write(self, unit: str, payload: Mapping[str, Any], *, failed: bool = False) -> None:
        """Write a unit durably; safe to call from several threads."""
        self.write_all([(unit, payload, failed)])

    def write_all(self, units: Iterable[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Write several (unit, payload, failed) durably in one step."""
        with self._lock:
            calls = {CALLS: self.budget.recorded} if self.budget.recorded else {}
            written = [(unit, {**payload, **calls}, failed) for unit, payload, failed in units]
            self.journal.append(written)  # first: a unit that is counted or logged is on disk
            for _, payload, _ in written:
                self._so_far.add(payload)
            if self.follow is not None:
                self.follow(self._so_far.figures(self.budget.spent), self._so_far.units)

    def table(self, kind: Kind, rows: "Iterable[Row | RecordBatch]", name: str | None = None) -> None:
        """Write a Parquet output; the rows of an iterator are never all in memory."""
        from composer_stages.runs.tables import write_table

        name = name or f"{kind.name}s"
        file = f"{name}.parquet"
        self.manifest.outputs[name] = {"file": file, **write_table(self.path / file, kind, rows)}

    def checkpoint(self, fill: Callable[[Path], object], name: str = "checkpoint", kind: Kind = CHECKPOINT) -> None:
        """Write a folder output atomically and durably: `fill` fills a temporary folder that is then renamed."""
        temporary, final = self.path / f".{name}.tmp", self.path / name
        if temporary.exists():
            rmtree(temporary)  # an error is one of the disk, and says so
        temporary.mkdir(parents=True)
        fill(temporary)
        store.sweep(temporary)  # what is linked from scratch may hold a file that a killed attempt had begun
        store.publish_folder(temporary, final)
        files = store.folder_digests(final)
        self._digests |= {f"{name}/{file}": sha256 for file, sha256 in files.items()}
        content = store.digest_of_files(files)
        digests = {"sha256": content, "content_sha256": content}
        self.manifest.outputs[name] = {"file": name, "kind": str(kind), "rows": 1, **digests}

    def write_export(self, name: str, fill: Callable[[BinaryIO], int]) -> int:
        """Write an output in another program's format; `fill` writes it, without keys, and returns its records.

        Raises `ComposerError` where this attempt has written a file of that name: the second would replace the first.
        """
        if name.casefold() in self._exported:
            raise ComposerError("runs.export-file-twice", name=name)
        self._exported.add(name.casefold())
        with store.sealing(self.path / name) as file:
            rows = fill(file)
        content = store.file_sha256(self.path / name)
        digests = {"sha256": content, "content_sha256": content}
        self.manifest.outputs[name] = {"file": name, "kind": "foreign/1", "rows": rows, **digests}
        return rows

    def document(self, name: str, value: Any) -> None:
        """Write a JSON document of the run (a report, a verdict)."""
        store.write_json(self.path / f"{name}.json", value)

    def write_report(self, before: Sequence[str], judgement: str, after: Sequence[str] = ()) -> None:
        """Write the report of a stage that judges its run: lines, the line of the judgement, further lines.

        The other lines are kept as JSON, so that judging again renders the report anew (`render_report`).
        """
        lines = {"before": list(before), "after": list(after)}
        self.document(REPORT_LINES, lines)
        self.write_file(REPORT, render_report(lines, judgement))

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a file of the run, for `Run.read_file`; it is no output, so its digest is not recorded.

        content: a text for people, whose control characters are spelled out, as ids, models and errors of other
        programs are in it; or the bytes of any other file.
        """
        data = escape_control_characters(content).encode() if isinstance(content, str) else content
        store.write_sealed(self.path / name, data)

    def metrics(self, rows: Iterable[Row]) -> None:
        """Write `metrics.jsonl`."""
        store.write_sealed(self.path / "metrics.jsonl", b"".join(store.encode(row) + b"\n" for row in rows))

    def sealed_files(self) -> dict[str, SealedFile]:
        """Return the size and the digest of every file that is to stay as it is."""
        outputs = self.manifest.outputs.values()
        digests = {out["file"]: out["sha256"] for out in outputs} | self._digests
        files = {}
        for path, name in store.visible_files(self.path):
            if name.parts[0] not in UNSEALED:
                digest = digests.get(str(name)) or store.file_sha256(path)
                files[str(name)] = SealedFile(bytes=path.stat().st_size, sha256=digest)
        return files

    def scratch(self, name: str) -> Path:
        """Return a folder for data that only a resumed attempt needs; it is removed when the run completes."""
        folder = self.path / "scratch" / name
        store.make_folder(folder)
        return folder

    def live(self, rows: list[Row], done: int, total: int) -> None:
        """Write the state of unfinished units for `composer show --follow`; it is removed when the run completes."""
        state = {"at": time.time(), "done": done, "total": total, "units": rows}
        store.write_json(self.scratch("live") / "units.json", state)

    def count(self, **numbers: int) -> None:
        """Set named counts (planned, done, failed, dropped by reason) in the manifest."""
        # int(): pydantic cannot serialise the integers of numpy and torch.
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
        """Record a model of the run: its name, commit, digests of tokenizer and chat template.

        `BadInput` where an earlier attempt had the model in another version, as a hub's name does not fix one.
        """
        self.manifest.models[role] = facts
        version = {name: facts[name] for name in OF_VERSION if name in facts}
        record = self.scratch(DRAWN) / f"model-{store.digest(role)[:16]}.json"
        before = store.read_json(record) if record.is_file() else {}
        if changed := [
            name for name in OF_VERSION if name in before and before[name] != version.get(name, before[name])
        ]:
            raise BadInput("runs.model-changed", model=facts.get("model", role), changed=changed)
        if version.keys() - before.keys():
            store.write_json(record, {**version, **before})

    def progress(self, noun: str, done: int, total: int) -> None:
        """Report progress to the listener; may be called often."""
        self._so_far.begin()
        self._listen(noun, done, total)
        if figures := self._so_far.text(self.budget.spent):
            self._listen(Figures(figures), 0, 0)

    def raise_if_stopped(self) -> None:
        """Raise `Interrupted` after a stop request; call it between units."""
        if self.stop.is_set():
            raise Interrupted


@dataclass
class RunningTotals:
    """Mean reward, sampled tokens per second and cost of a run in progress, for progress lines and log backends.

    The mean is that of the newest training step, because each step has another policy; an evaluation has one mean per
    arm. The rate counts from this attempt's first progress on, so that a server's start does not count.
    """

    clock: Callable[[], float] = time.monotonic
    units: int = 0
    tokens: int = 0
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The sum and the number of the rewards, by the name of their mean."""
    _name: str = "mean reward"
    _began: float = -1.0
    _before: int = 0
    """The tokens of earlier attempts."""
    _curve: Sparkline = field(default_factory=Sparkline)
    """The rewards of a collection in their order, or the means of a training's steps."""

    def begin(self) -> None:
        """Start the clock of the token rate; later calls have no effect."""
        if self._began < 0:
            # The journal's tokens so far are of earlier attempts: they were not sampled in this attempt's time.
            self._began, self._before = self.clock(), self.tokens

    def add(self, payload: Mapping[str, Any]) -> None:
        """Add one unit's payload: a rollout, an evaluation item, a continuation, an answer, a training step."""
        self.units += 1
        if "taken" in payload:
            self._sums, self._name = {}, "reward of the last step"
            for reward in payload["rewards"]:
                self._unit({"reward": reward}, "reward", "reward", "completion_tokens")
            for total, count in self._sums.values():
                self._curve.add(total / count)
        elif isinstance(rollout := payload.get("rollout"), Mapping):
            # Those of a training count for the step that takes them.
            name = "" if rollout.get("source") == "train" else "reward"
            self._unit(rollout, "reward", name, "completion_tokens")
            if name and rollout.get("reward") is not None:
                self._curve.add(rollout["reward"])
        elif isinstance(item := payload.get("item"), Mapping):
            self._name = "passed"
            self._unit(item, f"passed/{item.get('arm', '')}", "passed", "sampled_tokens")
        elif isinstance(continuation := payload.get("continuation"), Mapping):
            self._name = "passed"
            self._unit(continuation, "passed", "passed", "completion_tokens")
        elif isinstance(answer := payload.get("answer"), Mapping):
            self.tokens += answer.get("completion_tokens") or 0

    def _unit(self, row: Mapping[str, Any], name: str, value: str, tokens: str) -> None:
        self.tokens += row.get(tokens) or 0
        if row.get(value) is not None:  # null: the environment could not grade it, which is not a reward of 0
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(row[value]), count + 1

    def pace(self) -> float:
        """Return the sampled tokens per second of this attempt; 0.0 before any."""
        seconds = self.clock() - self._began
        return (self.tokens - self._before) / seconds if self._began >= 0 and seconds > 0 else 0.0

    def figures(self, usd: float) -> dict[str, float]:
        """Return means by name, sampled tokens, their rate and the cost, as log backends take them."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return {**means, "sampled_tokens": self.tokens, "tokens_per_second": self.pace(), "cost_usd": usd}

    def text(self, usd: float) -> str:
        """Return `mean reward 0.412 ▁▃▅, 35 tokens a second, 0.03 USD`, without the parts that do not exist yet.

        An evaluation has the rate of each arm: `passed: start 0.250, A 0.125`.
        """
        curve = f" {self._curve}" if len(self._curve.points) > 1 else ""
        rates = {name.partition("/")[2]: total / count for name, (total, count) in self._sums.items()}
        means = ", ".join(f"{arm} {rate:.3f}" for arm, rate in rates.items())
        reward = [f"{self._name}{':' if any(rates) else ''} {means.strip()}{curve}"] if rates else []
        pace = [f"{self.pace():,.0f} tokens a second"] if self.pace() >= 0.5 else []
        return ", ".join([*reward, *pace, *([f"{usd:.4f} USD"] if usd else [])])
