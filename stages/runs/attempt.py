"""One attempt at a stage: its manifest says `running`, the stage runs, and the manifest's status flips last."""

import errno
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

from stages import STAGES
from stages.backends import ranks
from stages.errors import ComposerError, Incomplete
from stages.runs import folders, signals, store
from stages.runs import inputs as inputs_
from stages.runs import manifest as manifests
from stages.runs.artifact import Interrupted, Out
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.manifest import Manifest, Status

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
    folders.reserve(folder)
    store.write_json(folder / "config.json", record.config)
    return record


def manifest_of(stage: str, config: StageConfig, identity: dict[str, Any], print_: str, inputs: Inputs) -> Manifest:
    """A manifest that says what is to be done, and nothing of how it went."""
    return Manifest(
        composer=version(DISTRIBUTION),
        stage=stage,
        stage_version=import_module(STAGES[stage].module).VERSION,
        fingerprint=print_,
        label=config.label(),
        started_at=_now(),
        config=config.model_dump(mode="json"),
        identity=identity,
        inputs=inputs_.references(inputs),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def carry_out(stage: ModuleType, inputs: Inputs, config: StageConfig, out: Out) -> None:
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
