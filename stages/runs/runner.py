"""Execute one stage: resolve its run folder, find out whether the work is done, run it, and seal the manifest last.

    result = runner.execute("collect", {}, Config(), root=Path("artifacts"))

The same call serves the command line, a preset chain and a notebook. A run folder is named after its start, its label
and the first six hex digits of its fingerprint (artifacts/collect/20260821T140512Z-kata-7f3ac1/); the link `latest` in
the stage's folder points to the newest complete run. Nothing is overwritten and nothing is asked.

In this order: `execute` and its dry run `preflight`; the run that some work resolves to; one attempt at it.
"""

import errno
import os
import shutil
import signal
import sqlite3
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_jsonable_python

from composer_stages.backends import devices, ranks
from composer_stages.backends.engine import Engine, find_engine
from composer_stages.errors import BadInput, Breakdown, ComposerError, Incomplete, UsageError, not_a_folder
from composer_stages.layout import escape_control_characters, shortened
from composer_stages.runs import ledger, store
from composer_stages.runs.activity import on_activity
from composer_stages.runs.bucket import Mirror
from composer_stages.runs.catalog import check_inputs, progress
from composer_stages.runs.run import (
    ANSWERS,
    DRAWN,
    REPORT,
    REPORT_LINES,
    Inputs,
    Listener,
    Manifest,
    Run,
    RunWriter,
    SealedFile,
    Status,
    find_folder,
    program_versions,
    read_manifest,
    render_report,
    without_time,
    write_manifest,
)
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.spread import ShardScheduler
from composer_stages.runs.stage import Stage, load_stage
from composer_stages.stopping import Interrupted, on_signals, stopped_by
from composer_stages.words import Sentence

DISTRIBUTION = "composer-post-training"
MODELS = "models"
"""Folder beside the runs for what they share: paid answers."""
RESERVE, RESERVED_BYTES = ".reserve", 32 * 1024
"""A file of random bytes that is deleted before the manifest is written for the last time: a run that fills the disk
still has the space to record so. Random, since a file system that compresses would store zeros in no space."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors after which nothing can be written: a full disk, a user's quota (home folders of clusters), `ulimit -f`, a
file system that became read-only, and one that fails."""
SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""The same in the cache of paid answers, as primary codes: SQLite's errors carry no errno."""
FULL_WORDS = (
    *(os.strerror(code) for code in FULL if code != errno.EIO),
    "unexpected pos",  # torch.save (2.13) in its own words, where a write was cut short
)
"""The same in errors of libraries that carry no errno: safetensors, torch, DuckDB, and the error of a worker."""
MIN_FREE_BYTES = 64 * 2**20
"""A disk with less free space counts as full before a run begins."""


@dataclass(frozen=True)
class Result:
    """The folder of a run and how it ended. `fresh`: whether it ran now; `reason` says why it ran or did not."""

    path: Path
    status: str
    fresh: bool
    reason: str


def execute(
    stage: str,
    runs: Mapping[str, Run | Sequence[Run]],
    config: StageConfig,
    *,
    root: Path,
    out: Path | None = None,
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    fresh: bool = False,
    listener: Listener | None = None,
    on: str | None = None,
    gpus: int | None = None,
    mirror: Mirror | None = None,
) -> Result:
    """Bring a stage to completion and return its run.

    Returns at once when the same work (by fingerprint) is already complete. Raises `ComposerError` (refused, bad input,
    incomplete) or `Interrupted`; everything finished is on disk in every case. Of several processes that torchrun
    started, rank 0 calls this and the others `execute_as_peer`.

    on: the engine whose workers do the units (`composer_stages.backends.engine.find_engine`). gpus: how many the run
    takes where there are any, or each of its workers; None for one if its settings load a model. mirror: the run's
    place in a bucket; `out` is its local folder then.
    """
    inputs = Inputs(runs)
    gpus = int(config.uses_gpu()) if gpus is None else gpus
    resolved, loaded = resolve_run(stage, inputs, config, root=root, out=out), load_stage(stage)
    # Peers wait in `execute_as_peer` from here until `_attempt` lets them begin, or until this block ends without.
    with ranks.join().leading(), disk_failures_as_such(resolved.folder), locked(resolved.folder):
        # Again, as another process may have done the work, in a folder with another time in its name.
        folder_of_run = find_folder(root / stage, config.label(), resolved.fingerprint, out)
        resolved = replace(resolved, folder=folder_of_run[0], existing=folder_of_run[1])
        folder = resolved.folder
        if resolved.existing and not clean:
            if done := resolved.completed():
                if not finished_to_the_end(folder, root / stage):
                    rmtree(folder / "scratch", ignore_errors=True)
                    _point_latest(folder, root / stage)
                return judge_again(stage, config, done)
            clean = _settle_existing(resolved, resume=resume)
        if resolved.existing and clean:
            _empty(folder)
        elif not resume:  # an attempt that left nothing finished: what was answered for nothing is asked for again
            for name in (ANSWERS, DRAWN):
                rmtree(folder / "scratch" / name, ignore_errors=True)
        # The engine is opened before the manifest is written: one that cannot be reached leaves no run folder behind.
        engines: AbstractContextManager[Engine | None] = nullcontext() if on is None else closing(find_engine(on, gpus))
        with engines as engine:
            # Processes of torchrun on this machine have a GPU each.
            device = devices.used(gpus * ranks.local_count()) if engine is None else engine.device
            _import_ahead(loaded)
            record = _begin(stage, config, resolved, inputs, device)
            writer = RunWriter(
                folder,
                record,
                cache=root / MODELS,
                max_cost=max_cost,
                fresh=fresh,
                listener=listener,
                spread=ShardScheduler(engine, stage, inputs, config),
            )
            following = mirror.following(writer, units=loaded.work is not None) if mirror else nullcontext()
            telling = on_activity(lambda text: listener(text, 0, 0) if listener else None)
            with following, telling, on_signals(), stopped_by(writer.stop):
                try:
                    with _attempt(writer):
                        writer.require_whole_ledger()
                        loaded.run(inputs, config, writer)
                except (UsageError, BadInput):
                    # A refusal before any work leaves no folder, so that the corrected command is not refused for it.
                    if record.attempts == 1 and not len(writer.journal) and not writer.budget.calls:
                        _empty(folder)
                        folder.rmdir()
                    raise
        _point_latest(folder, root / stage)
    return Result(folder, "complete", True, "resumed" if record.attempts > 1 else "ran")


def judge_again(stage: str, config: StageConfig, done: Result) -> Result:
    """Return a complete run with the verdict by the limits of these settings, which is written where it changed.

    So are the seeds that were asked for together.
    """
    loaded = load_stage(stage)
    record = read_manifest(done.path)
    if (together := _seeds_together(config, record)) != record.config:
        record.config = together
        write_manifest(done.path, record)
    if loaded.judge is None or "judgement" not in record.summary:
        return done
    before, now = record.outcome, loaded.judge(done.path, record.summary, config)
    if (outcome := before.judged(now)) == before:
        return done
    lines = _report_lines(Run(done.path), before.summary["judgement"])
    report = escape_control_characters(render_report(lines, now.line))
    record.outcome = outcome
    # Without its digest while the report is replaced: a kill between two writes then leaves no damaged run.
    record.files.pop(REPORT, None)
    write_manifest(done.path, record)
    store.write_sealed(done.path / REPORT, report.encode())
    size, digest = (done.path / REPORT).stat().st_size, store.file_sha256(done.path / REPORT)
    record.files[REPORT] = SealedFile(bytes=size, sha256=digest)
    write_manifest(done.path, record)
    return replace(done, reason=Sentence("runs.judged-again", reason=done.reason))


def _seeds_together(config: StageConfig, record: Manifest) -> dict[str, Any]:
    """Return the settings of a run that was begun before, with the seeds that a later call asked for with its own."""
    seeds = len(config.each_seed())
    return {**record.config, "seeds": seeds} if seeds > 1 else record.config


def _report_lines(run: Run, judgement: str) -> Mapping[str, Sequence[str]]:
    """Return the lines of a report before and after that of the judgement."""
    if document := run.read_file(f"{REPORT_LINES}.json"):
        lines: Mapping[str, Sequence[str]] = store.parse_json(document)
        return lines
    # Runs of earlier versions have the text alone.
    before, _, after = (run.read_file(REPORT) or b"").decode().partition(judgement)
    return {"before": [before.removesuffix("\n")], "after": [*filter(None, [after.strip("\n")])]}


def execute_as_peer(stage: str, runs: Mapping[str, Run | Sequence[Run]], config: StageConfig, *, root: Path) -> None:
    """Run the stage in a torchrun process other than rank 0, once rank 0 begins; return at once if it does not.

    Nothing is kept: the tables, metrics and checkpoints of rank 0 are those of all processes.
    """
    if not ranks.join().broadcast_from_rank0(lambda: True):
        return
    inputs = Inputs(runs)
    with TemporaryDirectory() as folder:
        record = _new_manifest(stage, config, config.identity(), "", inputs)
        writer = RunWriter(Path(folder), record, cache=root / MODELS)
        with on_signals(), stopped_by(writer.stop):
            load_stage(stage).run(inputs, config, writer)


def preflight(
    stage: str,
    runs: Mapping[str, Run | Sequence[Run]],
    config: StageConfig,
    *,
    root: Path,
    out: Path | None = None,
    resume: bool = False,
    clean: bool = False,
) -> list[str]:
    """Return what was checked, a line each; raises what `execute` with the same arguments would raise before its work.

    But of the same run that is unfinished it says how far it is, without `resume` too. Nothing is written and nothing
    paid for. Inputs are compared with their digests; models and environments are checked by the `check` of their
    settings.
    """
    inputs = Inputs(runs)
    resolved, unfinished = resolve_run(stage, inputs, config, root=root, out=out), list[str]()
    if resolved.existing and not clean:
        with locked(resolved.folder):  # refuses a run in progress, as `execute` would
            if resolved.completed():
                return [Sentence("runs.nothing-to-do", folder=resolved.folder)]
            unfinished = _left_undone(resolved, resume=resume)
    count = sum(1 for _ in inputs.runs())
    read = [Sentence("runs.inputs-unchanged", count=count)] if count else []
    checked = config.check()
    _import_ahead(load_stage(stage))
    return [*unfinished, *read, *checked, check_disk_space(resolved.folder)]


def _import_ahead(stage: Stage[Any]) -> None:
    """Import what a stage needs at its end alone."""
    if stage.outputs:
        import_module("composer_stages.runs.tables")
    for name in stage.at_end:
        if find_spec(name.partition(".")[0]):
            import_module(name)


def check_disk_space(folder: Path) -> str:
    """Return the free space below a folder that need not exist yet, in words; `UsageError` for next to none."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(existing)
    if usage.total and usage.free < MIN_FREE_BYTES:  # a file system such as /proc has no room to speak of
        free_mib = usage.free / 2**20
        raise UsageError("runs.no-disk-space", existing=existing, left=free_mib)
    _check_writable(existing)
    return Sentence("runs.folder-writable", existing=existing, free=usage.free / 2**30)


@dataclass(frozen=True)
class ResolvedRun:
    """The run of some work: its fingerprint, the settings that determine it, and its folder.

    `existing`: whether the folder already holds a run, which may be of other work where a user chose the folder.
    """

    fingerprint: str
    identity: dict[str, Any]
    folder: Path
    existing: bool

    def completed(self) -> Result | None:
        """Return the run in the folder as the result, if it is of this work, complete and undamaged."""
        if not self.existing:
            return None
        try:
            run = Run(self.folder)
        except BadInput:
            return None
        same = run.manifest.fingerprint == self.fingerprint and run.manifest.status == "complete"
        return Result(self.folder, "complete", False, "up to date") if same and not run.damage() else None


def resolve_run(
    stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None, check: bool = True
) -> ResolvedRun:
    """Return the run of a stage with these inputs and settings; `BadInput` where an input is unfinished or damaged.

    check: whether the inputs are checked, which reads all their tables.
    """
    if check:
        check_inputs(inputs)
    identity = config.identity()
    # What determines results: the stage, its version, the settings that matter, and the content of the inputs (not
    # their paths, so that a moved or republished input changes nothing).
    contents = {name: [ref.content for ref in refs] for name, refs in inputs.refs().items()}
    loaded = load_stage(stage)
    fingerprint = store.digest([stage, loaded.version, identity, contents])
    store.require_text(out or root.absolute())
    folder, existing = find_folder(root / stage, config.label(), fingerprint, out)
    return ResolvedRun(fingerprint, identity, folder, existing)


def nothing_to_resume(
    stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None
) -> str | None:
    """Return why no run is resumed, where the newest run of the same label and inputs has other settings; else None."""
    resolved = resolve_run(stage, inputs, config, root=root, out=out, check=False)
    if resolved.existing or out is not None:
        return None
    planned = _new_manifest(stage, config, resolved.identity, resolved.fingerprint, inputs)
    for path in sorted((root / stage).glob("*/manifest.json"), reverse=True):  # names begin with the time
        if path.parent.is_symlink():
            continue
        with suppress(BadInput):
            recorded = read_manifest(path.parent)
            if recorded.label == planned.label and _read(recorded) == _read(planned):
                changed = differences(recorded.identity, planned.identity)
                if not changed:
                    return None
                newest, further = f"{stage}/{path.parent.name}", max(len(changed) - 3, 0)
                return Sentence("runs.nothing-to-resume", newest=newest, changes=changed[:3], further=further)
    return None


def _read(manifest: Manifest) -> dict[str, list[str]]:
    """Return the contents of what a run read."""
    return {name: [ref.content for ref in refs] for name, refs in manifest.inputs.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """Return the settings that differ: the key, what was found and what is asked, as text."""
    changed = list[tuple[str, str, str]]()
    now = to_jsonable_python(now, inf_nan_mode="constants")  # as they are recorded: a date is a text there
    for key in dict.fromkeys([*now, *before]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append((f"{prefix}{key}", shortened(repr(old)), shortened(repr(new))))
    return changed


def _settle_existing(resolved: ResolvedRun, *, resume: bool) -> bool:
    """Return whether the folder is to be emptied first; `UsageError` where it holds work that this run may not touch.

    An attempt without finished units or paid calls is replaced.
    """
    try:
        run = Run(resolved.folder)
    except BadInput:
        # The folder of a run ends with the fingerprint of its work: with it, the finished units are of use without the
        # manifest. A folder that a user chose may hold other work.
        if resume and resolved.folder.name.endswith(f"-{resolved.fingerprint[:6]}"):
            return False
        raise
    manifest = run.manifest
    if manifest.fingerprint != resolved.fingerprint:
        if not holds_work(run):
            return True
        changes = differences(manifest.identity, resolved.identity)[:3]
        raise UsageError("runs.folder-holds-other-run", folder=resolved.folder, changes=changes)
    # What the attempt before paid for stays in the ledger, so that --max-cost holds for both.
    if not resume and holds_work(run, paid=False):
        raise UsageError("runs.folder-holds-this-run", folder=resolved.folder, state=_state(run))
    return False


def _left_undone(resolved: ResolvedRun, *, resume: bool) -> list[str]:
    """Return how far the same run has come, in a line, where it is unfinished; otherwise do as `_settle_existing`."""
    with suppress(BadInput):
        run = Run(resolved.folder)
        if run.manifest.fingerprint == resolved.fingerprint and holds_work(run, paid=False):
            done = progress(run) or _state(run)
            return [Sentence("runs.run-unfinished", run_path=run.path, done=done, resume=resume)]
    _settle_existing(resolved, resume=resume)
    return []


def _state(run: Run) -> str:
    """Return the state of a run that is not up to date, in words."""
    status = run.manifest.status
    return f"complete but {run.damage()}" if status == "complete" else f"{status}, with what it had finished"


BOOKKEEPING = ("manifest.json", "config.json", "logs", "steps", ledger.NAME, RESERVE)
"""What every attempt writes into its folder before it has finished anything; `steps` by its units."""
NO_WORK = ("live", "asked", DRAWN, ANSWERS)
"""Folders in `scratch` that every attempt writes anew, but for the answers of servers in one with --resume."""


def holds_work(run: Run, *, paid: bool = True) -> bool:
    """Return whether an unfinished run holds anything that an attempt finished, or with `paid` a call that it made.

    Units that failed, logs and the manifest do not count. A complete run, whatever its damage, always holds work.
    """
    folder = run.path
    if run.manifest.status == "complete" or (paid and (folder / ledger.NAME).exists()):
        return True
    try:
        if any(not unit.get("failed") for unit in run.units()):
            return True
    except BadInput:  # a damaged journal holds units all the same
        return True
    files = [path.relative_to(folder).parts for path in folder.rglob("*") if not path.is_dir()]
    scratch = [parts[1] for parts in files if parts[0] == "scratch"]
    return any(name not in NO_WORK for name in scratch) or any(p[0] not in (*BOOKKEEPING, "scratch") for p in files)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process; `UsageError` when another process holds it.

    Folders of one work, whose names differ in their time alone, are held together; a link is held as its folder.
    """
    real = folder.resolve()
    try:
        _check_writable(real.parent)
    except UsageError:
        if not folder.is_symlink():
            raise
        _check_writable(folder.parent)  # of a folder of one's own in one that is not
    else:
        folder = real
    # Next to the folder: inside it, --clean would delete the lock that this process holds.
    lock = FileLock(folder.parent / f".{without_time(folder.name)}.lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise UsageError("runs.run-in-use", folder=folder) from None


def _check_writable(folder: Path) -> None:
    """`UsageError` where no file can be made. FileLock would report such a folder as locked by another process."""
    try:
        store.make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # a full disk is reported as such, not as a folder without permission
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            file = next(path for path in (folder, *folder.parents) if path.exists())
            raise not_a_folder(file, "artifacts", "out") from None
        raise UsageError("runs.folder-not-writable", folder=folder, strerror=error.strerror) from None


def _empty(folder: Path) -> None:
    """Delete the content of a folder but not the folder, which may be a mount point that a user chose."""
    for path in folder.iterdir():
        rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _point_latest(folder: Path, stage_folder: Path) -> None:
    """Let `latest` in a stage's folder point to this complete run, unless the run is elsewhere."""
    if folder.parent.resolve() != stage_folder.resolve():
        return
    # Made elsewhere and renamed, so that `latest` always exists; under a name of the run, since others of the stage may
    # end at the same moment; relative, so that the artifacts folder can be moved.
    temporary = stage_folder / f".{folder.name}.latest"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        temporary.replace(stage_folder / "latest")
        store.sync(stage_folder)
    except OSError as error:
        if full := _disk_full(error, folder):
            raise full from None
        raise Breakdown(
            "runs.latest-is-no-link", folder=folder, stage_folder=stage_folder / "latest", strerror=error.strerror
        ) from None


def finished_to_the_end(run: Path, stage_folder: Path) -> bool:
    """Return whether nothing is left of a complete run's end: no scratch folder, and no older run that is `latest`.

    A process that is killed after its manifest says complete leaves both, and a power cut may bring them back.
    """
    is_newer = run.parent.resolve() == stage_folder.resolve() and _finished(run) > _finished(stage_folder / "latest")
    return not is_newer and not (run / "scratch").exists()


def _finished(run: Path) -> tuple[str, int]:
    """Return when a run was completed, for comparison; the least value for a folder without a complete run."""
    try:
        manifest = read_manifest(run)
    except BadInput:
        return "", 0
    if manifest.status != "complete":
        return "", 0
    # The manifest has whole seconds, which runs may share; the file's own time changes when a folder is copied.
    return manifest.finished_at or "", (run / "manifest.json").stat().st_mtime_ns


def _begin(stage: str, config: StageConfig, resolved: ResolvedRun, inputs: Inputs, device: str) -> Manifest:
    """Write a new manifest, or the earlier attempt's continued, with the status `running` before any work."""
    # The status on disk is `running` before the stage runs, and `_close` replaces it last: a kill at any point between
    # leaves a folder that `status` reports as ended without finishing, and that --resume continues.
    folder = resolved.folder
    previous = _previous_manifest(folder)
    if previous is not None:
        _require_whole_ledger(folder, previous)
    store.sweep(folder)
    record = previous or _new_manifest(stage, config, resolved.identity, resolved.fingerprint, inputs)
    record.config = _seeds_together(config, record)
    record.inputs = inputs.refs()  # as the folders may have been moved since
    record.status, record.reason, record.attempts = "running", "", record.attempts + 1
    record.packages, record.code = program_versions()
    record.device, record.files = device, {}
    write_manifest(folder, record)
    (folder / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))  # its name begins with a dot: no output, never published
    store.write_json(folder / "config.json", record.config)
    return record


def _previous_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of earlier attempts; None without one, and for an unreadable one, which is kept in `logs`."""
    path = folder / "manifest.json"
    if not path.exists():
        return None
    try:
        return read_manifest(folder)
    except BadInput:
        (folder / "logs").mkdir(exist_ok=True)
        path.replace(folder / "logs" / f"damaged-manifest-{time.time_ns()}.json")
        return None


def _require_whole_ledger(folder: Path, previous: Manifest) -> None:
    """`BadInput` where the ledger of an unfinished run holds less than was paid by the end of its attempt before.

    Each line has a check value, but a line that is missing has none. A published run has no ledger, and is finished.
    """
    paid, _ = ledger.totals(folder) or (0.0, 0.0)
    if previous.status != "complete" and paid < previous.cost_usd * (1 - ledger.ROUNDING):
        raise BadInput("runs.ledger-lines-missing", folder=folder / ledger.NAME, paid=paid, cost_usd=previous.cost_usd)


def _new_manifest(
    stage: str, config: StageConfig, identity: dict[str, Any], fingerprint: str, inputs: Inputs
) -> Manifest:
    """Return a manifest of the work ahead, without any results."""
    return Manifest(
        composer=version(DISTRIBUTION),
        stage=stage,
        stage_version=load_stage(stage).version,
        fingerprint=fingerprint,
        label=config.label(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config.model_dump(mode="json"),
        identity=identity,
        inputs=inputs.refs(),
    )


@contextmanager
def _attempt(out: RunWriter) -> Iterator[None]:
    """Let peers begin, and write into the manifest how the block ended, whatever it raised."""
    started = time.monotonic()
    status: Status = "failed"
    reason = ""
    caught: list[int] = []
    try:
        with on_signals() as caught:
            ranks.join().begin()
            yield
        status = "complete"
    except Interrupted as error:  # raised by the stage between two units; it does not know the signal
        error.signal_number = caught[-1] if caught else signal.SIGINT
        by = "the user" if error.signal_number == signal.SIGINT else signal.Signals(error.signal_number).name
        status, reason = "interrupted", f"stopped by {by}"
        has_units = any(
            path.parent.name not in ("live", DRAWN, ANSWERS) for path in (out.path / "scratch").glob("*/*")
        )  # such as checkpoints
        if not (has_units or len(out.journal) or out.manifest.outputs or out.budget.calls):
            error.notice = Sentence("runs.nothing-finished")
        raise
    except Incomplete as error:
        status, reason = "incomplete", str(error)
        raise
    except ComposerError as error:
        full = _disk_full(error, out.path)
        reason = str(full or error)
        if full is not None:
            raise full from error
        raise
    except BaseException as error:
        if full := _disk_full(error, out.path):
            reason = str(full)
            raise full from error  # without a log: there is no room for it
        if isinstance(error, OSError) and (broken := _broken_off(error, out)):
            reason = str(broken)
            raise broken from error
        if isinstance(error, OSError):
            reason = str(error)
        elif isinstance(error, KeyboardInterrupt):  # where no handler is set (a thread)
            status, reason = "interrupted", "stopped by the user"
        else:
            reason = repr(error)
        log = f"logs/attempt-{out.manifest.attempts}.log"
        error.add_note(f"The log is {out.path / log}.")
        with suppress(OSError):
            out.write_file(log, "".join(traceback.format_exception(error)))
        raise
    finally:
        _close(out, status, reason, time.monotonic() - started)


def _close(out: RunWriter, status: Status, reason: str, seconds: float) -> None:
    """Seal the journal of a complete run and replace the manifest, whose status is the last thing that is written."""
    record = out.manifest
    record.status, record.reason = status, reason
    record.finished_at = datetime.now(UTC).isoformat(timespec="seconds")
    record.seconds += seconds
    record.cost_usd, record.possibly_usd = out.budget.spent, out.budget.possibly + out.budget.reserved
    if out.budget.understated:
        lower = {"answers": out.budget.understated, "usd": out.budget.understated_usd}
        record.outcome.summary["understated_bills"] = lower
    try:
        (out.path / RESERVE).unlink(missing_ok=True)  # frees its bytes for the manifest
        if status == "complete":
            out.journal.seal()
            record.files = out.sealed_files()
        write_manifest(out.path, record)
        if status == "complete":  # not earlier: a run that is not complete goes on from its scratch folder
            rmtree(out.path / "scratch", ignore_errors=True)
    except OSError as error:
        if status == "complete":  # else the error that ended the run is being raised, and explains more
            raise (_disk_full(error, out.path) or error) from None


def _broken_off(error: OSError, out: RunWriter) -> ComposerError | None:
    """Return the error of an attempt whose files cannot be read or written any more; None before any work."""
    if error.errno not in (errno.EMFILE, errno.ENFILE) and error.filename is None:
        return None
    if not out.budget.calls and not len(out.journal):
        return None
    where, why = error.filename or out.path, error.strerror
    if not out.path.is_dir():
        return Breakdown("runs.run-deleted", out_path=out.path, where=where, why=why)
    mend = "Raise `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else "Check the path and its permissions"
    return Breakdown("runs.file-failed", where=where, why=why, out_path=out.path, mend=mend)


@contextmanager
def disk_failures_as_such(folder: Path) -> Iterator[None]:
    """Raise the sentence of a failed disk in the place of any error that one caused."""
    try:
        yield
    except OSError as error:
        raise (_disk_full(error, folder) or error) from None


def _disk_full(error: BaseException, folder: Path) -> ComposerError | None:
    """Return the error to show where nothing can be written, also for an error that it caused; None for any other."""
    cause: BaseException | None = error
    while cause is not None:
        code = getattr(cause, "sqlite_errorcode", None)  # extended: the primary code is in the low byte
        is_full = (isinstance(cause, OSError) and cause.errno in FULL) or (
            code is not None and code & 0xFF in SQLITE_FULL
        )
        if is_full or (not isinstance(cause, ComposerError) and any(words in str(cause) for words in FULL_WORDS)):
            first = (str(cause).splitlines() or [""])[0].rstrip(".")  # torch adds a trace of its C++ functions
            return Breakdown("runs.disk-full", first=first, folder=folder)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None
