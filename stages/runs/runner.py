"""Carries out one stage: finds out whether it is done, opens its run folder, runs it, and seals the manifest last.

    result = runner.execute("collect", {}, Config(), root=Path("artifacts"))

The same call serves the command line, a preset chain and a notebook.
"""

import errno
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from stages import STAGES
from stages.backends import ranks
from stages.errors import BadInput, ComposerError, Incomplete, UsageError
from stages.runs import folders, signals, store
from stages.runs import inputs as inputs_
from stages.runs import manifest as manifests
from stages.runs.artifact import Interrupted, Listener, Out, Run
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.manifest import Manifest, Status

DISTRIBUTION = "composer-post-training"


@dataclass(frozen=True)
class Result:
    """Where a run lies and how it ended. `fresh`: whether it ran now; `reason` says why it ran or did not."""

    path: Path
    status: str
    fresh: bool
    reason: str


def module(stage: str) -> ModuleType:
    """The stage module of a command name such as `extract-pairs`; `UsageError` names the stages there are."""
    if stage not in STAGES:
        raise UsageError(f"There is no stage {stage!r}. The stages are: {', '.join(STAGES)}.")
    return import_module(STAGES[stage].module)


def fingerprint(stage: str, identity: Mapping[str, Any], inputs: Inputs) -> str:
    """SHA-256 over what determines results: stage, its VERSION, the settings that matter, the content of the inputs."""
    contents = {name: [ref.content for ref in refs] for name, refs in inputs_.references(inputs).items()}
    return store.digest([stage, module(stage).VERSION, identity, contents])


def standing(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Result | None:
    """The run that holds this work already, complete and undamaged; None when there is something to do."""
    inputs_.check(inputs)
    print_ = fingerprint(stage, config.identity(), inputs)
    folder, existing = folders.locate(root / stage, config.label(), print_, out)
    return finished(folder, print_) if existing else None


def finished(folder: Path, print_: str) -> Result | None:
    """The run in a folder as the result of this work, where it is that and complete and undamaged."""
    found = Run(folder)
    is_it = found.manifest.fingerprint == print_ and found.manifest.status == "complete" and not found.damage()
    return Result(folder, "complete", False, "up to date") if is_it else None


def refuse(folder: Path, print_: str, identity: Mapping[str, Any], *, resume: bool) -> None:
    """`UsageError` where a folder holds another run, or an unfinished one of this work that is not to be resumed."""
    found = Run(folder)
    if found.manifest.fingerprint != print_:
        raise UsageError(
            f"{folder} holds a different run ({folders.difference(found.manifest, identity)}). "
            "Use --clean to delete it, or another --out."
        )
    if not resume:
        raise UsageError(folders.ways_out(folder, found.manifest, found.damage()))


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
) -> Result:
    """Bring a stage to completion and return where it lies.

    Returns at once when the same work (by fingerprint) is already complete. Raises `ComposerError` (refused, bad input,
    incomplete) or `Interrupted`; everything finished is on disk in every case. Of several processes that torchrun
    started the first does this, and the others work for it (`follow`).
    """
    inputs = Inputs(given)
    inputs_.check(inputs)
    identity = config.identity()
    print_ = fingerprint(stage, identity, inputs)
    folder, existing = folders.locate(root / stage, config.label(), print_, out)
    with ranks.join().leading(), folders.locked(folder):
        if existing and not clean:
            if done := finished(folder, print_):
                return done
            refuse(folder, print_, identity, resume=resume)
        if clean and existing:
            folders.empty(folder)
        record = _open_manifest(stage, config, identity, print_, inputs, folder)
        writer = Out(folder, record, cache=root / "models", max_cost=max_cost, listener=listener)
        try:
            _run(module(stage), inputs, config, writer)
        except (UsageError, BadInput):
            if record.attempts == 1 and not writer.records() and not writer.budget.used:
                folders.discard(folder)  # nothing was done, so nothing stands in the way of asking again
            raise
        folders.point_latest(folder, root / stage)
    return Result(folder, "complete", True, "resumed" if record.attempts > 1 else "ran")


def follow(stage: str, given: Mapping[str, Run | Sequence[Run]], config: StageConfig, *, root: Path) -> None:
    """What a process beside the first does under torchrun: nothing, or once the first begins, the same. Keeps nothing.

    The first one's tables, metrics and checkpoints are those of all.
    """
    if not ranks.join().of_first(lambda: True):
        return
    inputs = Inputs(given)
    with TemporaryDirectory() as folder:
        record = _manifest(stage, config, config.identity(), "", inputs)
        writer = Out(Path(folder), record, cache=root / "models")
        with signals.draining(writer):
            module(stage).run(inputs, config, writer)


def _open_manifest(
    stage: str, config: StageConfig, identity: dict[str, Any], print_: str, inputs: Inputs, folder: Path
) -> Manifest:
    """A new manifest, or the earlier attempt's continued; written with status `running` before any work."""
    previous = manifests.read(folder) if (folder / "manifest.json").exists() else None
    record = previous or _manifest(stage, config, identity, print_, inputs)
    record.status, record.reason, record.attempts = "running", "", record.attempts + 1
    record.packages, record.code = manifests.packages(), manifests.code()
    folder.mkdir(parents=True, exist_ok=True)
    manifests.write(folder, record)
    folders.reserve(folder)
    store.write_json(folder / "config.json", record.config)
    return record


def _manifest(stage: str, config: StageConfig, identity: dict[str, Any], print_: str, inputs: Inputs) -> Manifest:
    return Manifest(
        composer=version(DISTRIBUTION),
        stage=stage,
        stage_version=module(stage).VERSION,
        fingerprint=print_,
        label=config.label(),
        started_at=_now(),
        config=config.model_dump(mode="json"),
        identity=identity,
        inputs=inputs_.references(inputs),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run(stage: ModuleType, inputs: Inputs, config: StageConfig, out: Out) -> None:
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


def _close(out: Out, status: Status, reason: str, seconds: float) -> None:
    record = out.manifest
    record.status, record.reason, record.finished_at = status, reason, _now()
    record.seconds += seconds
    record.cost_usd, record.possibly_usd = out.budget.spent, out.budget.possibly + out.budget.reserved
    folders.release(out.path)
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


def _log(out: Out, error: BaseException) -> None:
    """Keep the traceback in the run folder; a note on the exception says where."""
    name = f"logs/attempt-{out.manifest.attempts}.log"
    error.add_note(f"The log is {out.path / name}.")
    with suppress(OSError):
        out.text(name, "".join(traceback.format_exception(error)))
