"""Carries out one stage: finds out whether it is done, opens its run folder, runs it, and seals the manifest last.

    result = runner.execute("collect", {}, Config(), root=Path("artifacts"))

The same call serves the command line, a preset chain and a notebook.
"""

import errno
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from stages.backends import ranks
from stages.errors import BadInput, ComposerError, Incomplete, UsageError
from stages.runs import artifact as inputs_
from stages.runs import manifest as manifests
from stages.runs import signals, store
from stages.runs.artifact import Inputs, Interrupted, Listener, Run, RunWriter
from stages.runs.bucket import Mirror
from stages.runs.config import StageConfig
from stages.runs.manifest import Manifest, Status
from stages.runs.spread import spreading
from stages.runs.stage import Stage, check_inputs, load_stage

# ---- folders
# Run folders: where a run lies, who holds it, and what to say when one is already there.
#
# artifacts/collect/20260821T140512Z-kata-7f3ac1/ ends in the first six hex digits of the run's fingerprint; `latest`
# beside it points to the newest complete one. Nothing is overwritten and nothing is asked.

RESERVE, RESERVED_BYTES = ".reserve", 32 * 1024


def locate(stage_folder: Path, label: str, fingerprint: str, out: Path | None) -> tuple[Path, bool]:
    """The run folder for a fingerprint and whether it already holds a run; `out` is the folder a user chose, if any."""
    if out is not None:
        if _foreign(out):
            raise UsageError(f"{out} is not empty and is no run folder. Choose another --out.")
        return out, (out / "manifest.json").exists()
    same = sorted(p for p in stage_folder.glob(f"*-{fingerprint[:6]}") if (p / "manifest.json").exists())
    complete = [path for path in same if _is_complete(path)]
    if same:
        return (complete or same)[-1], True
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return stage_folder / f"{stamp}-{label}-{fingerprint[:6]}", False


def _is_complete(folder: Path) -> bool:
    try:
        return manifests.read(folder).status == "complete"
    except BadInput:
        return False


def _foreign(out: Path) -> bool:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file. Choose a folder for --out.")
    return out.exists() and any(out.iterdir()) and not (out / "manifest.json").exists()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process; `UsageError` when another process holds it."""
    try_writing(folder.parent)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"{folder} is in use by another process. Wait for it to end, or choose another --out."
        ) from None


def try_writing(folder: Path) -> None:
    """`UsageError` where no file can be made, which a lock would take for another process's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"Nothing can be written to {folder} ({error.strerror}). Choose another --artifacts or --out."
        ) from None


def difference(found: Manifest, identity: Mapping[str, Any]) -> str:
    """In words, how a run that is there differs from the one that was asked for."""
    changed = [
        f"{key}: {found.identity.get(key)!r} there, {value!r} asked"
        for key, value in identity.items()
        if found.identity.get(key) != value
    ]
    return "; ".join(changed[:3]) or "its inputs or the stage's version differ"


def ways_out(folder: Path, found: Manifest, damage: str | None) -> str:
    """The sentence for a folder that holds an unfinished or damaged run of the same work."""
    state = f"complete but {damage}" if found.status == "complete" else f"{found.status}, with what it had finished"
    return (
        f"{folder} already holds this run ({state}). "
        "Use --resume to go on, --clean to start anew, or --out FOLDER to write elsewhere."
    )


def reserve(folder: Path) -> None:
    """Hold a little room, so that a run that fills the disk can still say so in its manifest."""
    (folder / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))


def release(folder: Path) -> None:
    """Give the room back."""
    (folder / RESERVE).unlink(missing_ok=True)


def empty(folder: Path) -> None:
    """Delete what is in a folder, not the folder."""
    for path in folder.iterdir():
        rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def discard(folder: Path) -> None:
    """Delete a run folder."""
    empty(folder)
    folder.rmdir()


def point_latest(folder: Path, stage_folder: Path) -> None:
    """Let `latest` in a stage's folder point to this run, if the run lies there."""
    if folder.parent.resolve() != stage_folder.resolve():
        return
    temporary = stage_folder / ".latest.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(stage_folder / "latest")


# ---- attempt
# One attempt at a stage: its manifest says `running`, the stage runs, and the manifest's status flips last.

DISTRIBUTION = "composer-post-training"


def begin(
    stage: str, config: StageConfig, identity: dict[str, Any], print_: str, inputs: Inputs, folder: Path
) -> Manifest:
    """A new manifest, or the earlier attempt's continued; written with status `running` before any work."""
    previous = manifests.read(folder) if (folder / "manifest.json").exists() else None
    store.sweep(folder)
    record = previous or manifest_of(stage, config, identity, print_, inputs)
    record.status, record.reason, record.attempts = "running", "", record.attempts + 1
    record.packages, record.code = manifests.packages(), manifests.code()
    folder.mkdir(parents=True, exist_ok=True)
    manifests.write(folder, record)
    reserve(folder)
    store.write_json(folder / "config.json", record.config)
    return record


def manifest_of(stage: str, config: StageConfig, identity: dict[str, Any], print_: str, inputs: Inputs) -> Manifest:
    """A manifest that says what is to be done, and nothing of how it went."""
    return Manifest(
        composer=version(DISTRIBUTION),
        stage=stage,
        stage_version=load_stage(stage).version,
        fingerprint=print_,
        label=config.label(),
        started_at=_now(),
        config=config.model_dump(mode="json"),
        identity=identity,
        inputs=inputs_.references(inputs),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def carry_out(stage: Stage[Any], inputs: Inputs, config: StageConfig, out: RunWriter) -> None:
    """Run the stage; its manifest says how it ended, whatever is raised."""
    started = time.monotonic()
    status: Status = "failed"
    reason = ""
    caught: list[int] = []
    try:
        with signals.draining(out) as caught:
            ranks.join().begin()
            stage.run(inputs, config, out)
        status = "complete"
    except Interrupted as error:
        error.signal_number, reason = signals.stopped_by(caught)
        status = "interrupted"
        raise
    except Incomplete as error:
        status, reason = "incomplete", str(error)
        raise
    except ComposerError as error:
        reason = str(error)
        raise
    except OSError as error:
        if _disk_full(error):
            full = _disk_sentence(error, out.path)
            reason = str(full)
            raise full from error
        reason = str(error)
        _log(out, error)
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            status, reason = "interrupted", "stopped by the user"
        else:
            reason = repr(error)
        _log(out, error)
        raise
    finally:
        _close(out, status, reason, time.monotonic() - started)


def _close(out: RunWriter, status: Status, reason: str, seconds: float) -> None:
    record = out.manifest
    record.status, record.reason, record.finished_at = status, reason, _now()
    record.seconds += seconds
    record.cost_usd, record.possibly_usd = out.budget.spent, out.budget.possibly + out.budget.reserved
    release(out.path)
    try:
        if status == "complete":
            out.journal.seal()
            rmtree(out.path / "scratch", ignore_errors=True)
        manifests.write(out.path, record)
    except OSError as error:
        if status == "complete":
            raise (_disk_sentence(error, out.path) if _disk_full(error) else error) from None


def _disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _disk_sentence(error: OSError, folder: Path) -> ComposerError:
    return ComposerError(
        f"The disk is full: {error}. Everything finished is saved in {folder}; free some room and rerun with --resume."
    )


def _log(out: RunWriter, error: BaseException) -> None:
    """Keep the traceback in the run folder; a note on the exception says where."""
    name = f"logs/attempt-{out.manifest.attempts}.log"
    error.add_note(f"The log is {out.path / name}.")
    with suppress(OSError):
        out.text(name, "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Result:
    """Where a run lies and how it ended. `fresh`: whether it ran now; `reason` says why it ran or did not."""

    path: Path
    status: str
    fresh: bool
    reason: str


def fingerprint(stage: str, identity: Mapping[str, Any], inputs: Inputs) -> str:
    """SHA-256 over what determines results: stage, its version, the settings that matter, the content of the inputs."""
    contents = {name: [ref.content for ref in refs] for name, refs in inputs_.references(inputs).items()}
    return store.digest([stage, load_stage(stage).version, identity, contents])


@dataclass(frozen=True)
class Work:
    """What is to be done, by its fingerprint and the settings that determine it, and the folder where it lies or would.

    `existing`: whether a run is there.
    """

    fingerprint: str
    identity: dict[str, Any]
    folder: Path
    existing: bool


def located(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Work:
    """The work that a stage would do; `BadInput` where an input is unfinished or damaged."""
    check_inputs(inputs)
    identity = config.identity()
    print_ = fingerprint(stage, identity, inputs)
    folder, existing = locate(root / stage, config.label(), print_, out)
    return Work(print_, identity, folder, existing)


def standing(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Result | None:
    """The run that holds this work already, complete and undamaged; None when there is something to do."""
    work = located(stage, inputs, config, root=root, out=out)
    return finished(work) if work.existing else None


def place(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Path | None:
    """The folder of the run that does or did this work; None before there is one."""
    print_ = fingerprint(stage, config.identity(), inputs)
    folder, existing = locate(root / stage, config.label(), print_, out)
    return folder if existing else None


def finished(work: Work) -> Result | None:
    """The run in the folder as the result of this work, where it is that and complete and undamaged."""
    found = Run(work.folder)
    is_it = found.manifest.fingerprint == work.fingerprint and found.manifest.status == "complete"
    return Result(work.folder, "complete", False, "up to date") if is_it and not found.damage() else None


def refuse(work: Work, *, resume: bool) -> None:
    """`UsageError` where the folder holds another run, or an unfinished one of this work that is not to be resumed."""
    found = Run(work.folder)
    if found.manifest.fingerprint != work.fingerprint:
        raise UsageError(
            f"{work.folder} holds a different run ({difference(found.manifest, work.identity)}). "
            "Use --clean to delete it, or another --out."
        )
    if not resume:
        raise UsageError(ways_out(work.folder, found.manifest, found.damage()))


def execute(
    stage: str,
    given: Mapping[str, Run | Sequence[Run]],
    config: StageConfig,
    *,
    root: Path,
    out: Path | None = None,
    resume: bool = False,
    clean: bool = False,
    max_cost: float | None = None,
    listener: Listener | None = None,
    on: str | None = None,
    mirror: Mirror | None = None,
) -> Result:
    """Bring a stage to completion and return where it lies.

    Returns at once when the same work (by fingerprint) is already complete. Raises `ComposerError` (refused, bad input,
    incomplete) or `Interrupted`; everything finished is on disk in every case. Of several processes that torchrun
    started the first does this, and the others work for it (`follow`).

    on: where the workers are among which the stage's units are dealt (`stages.backends.engine.find`). mirror: the place
    in a bucket that the run belongs to; `out` is its folder then.
    """
    inputs = Inputs(given)
    work = located(stage, inputs, config, root=root, out=out)
    folder = work.folder
    with ranks.join().leading(), locked(folder):
        if work.existing and not clean:
            if done := finished(work):
                return done
            refuse(work, resume=resume)
        if clean and work.existing:
            empty(folder)
        with spreading(on, stage, inputs, config) as spread:
            record = begin(stage, config, work.identity, work.fingerprint, inputs, folder)
            writer = RunWriter(
                folder, record, cache=root / "models", max_cost=max_cost, listener=listener, spread=spread
            )
            units = load_stage(stage).work is not None
            with mirror.following(writer, units=units) if mirror else nullcontext():
                try:
                    carry_out(load_stage(stage), inputs, config, writer)
                except (UsageError, BadInput):
                    if record.attempts == 1 and not len(writer.journal) and not writer.budget.used:
                        discard(folder)  # nothing was done, so nothing stands in the way of asking again
                    raise
        point_latest(folder, root / stage)
    return Result(folder, "complete", True, "resumed" if record.attempts > 1 else "ran")


def follow(stage: str, given: Mapping[str, Run | Sequence[Run]], config: StageConfig, *, root: Path) -> None:
    """What a process beside the first does under torchrun: nothing, or once the first begins, the same. Keeps nothing.

    The first one's tables, metrics and checkpoints are those of all.
    """
    if not ranks.join().broadcast_from_rank0(lambda: True):
        return
    inputs = Inputs(given)
    with TemporaryDirectory() as folder:
        record = manifest_of(stage, config, config.identity(), "", inputs)
        writer = RunWriter(Path(folder), record, cache=root / "models")
        with signals.draining(writer):
            load_stage(stage).run(inputs, config, writer)


# ---- preflight
# What a run would stumble over before its first unit, found without one: for `--dry-run`.

ROOM_BYTES = 64 * 2**20
"""With less room than this, a disk counts as full before anything is begun."""


def preflight(
    stage: str,
    given: Mapping[str, Run | Sequence[Run]],
    config: StageConfig,
    *,
    root: Path,
    out: Path | None = None,
    resume: bool = False,
    clean: bool = False,
) -> list[str]:
    """What was checked, a line each; raises what `runner.execute` with the same words would raise before its work.

    Nothing is written and nothing paid for. Inputs count by their digests, models and environments as the settings'
    own `check` says.
    """
    inputs = Inputs(given)
    work = located(stage, inputs, config, root=root, out=out)
    if work.existing and not clean:
        with locked(work.folder):
            if finished(work):
                return [f"{work.folder} is complete and up to date: there is nothing to do"]
            refuse(work, resume=resume)
    count = sum(1 for _ in inputs.runs())
    read = [f"{count} input run{'s' if count > 1 else ''}: complete, and as they were written"] if count else []
    return [*read, *config.check(), room(work.folder)]


def room(folder: Path) -> str:
    """How much may be written below a folder that need not exist yet; `UsageError` where that is next to nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try_writing(place)
    free = shutil.disk_usage(place).free
    if free < ROOM_BYTES:
        raise UsageError(
            f"{place} has room for {free / 2**20:.0f} MiB only. Free some, or choose another --artifacts or --out."
        )
    return f"{place} can be written to, {free / 2**30:,.1f} GiB free"
