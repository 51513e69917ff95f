"""Run folders: where a run lies, who holds it, and what to say when one is already there.

artifacts/collect/20260821T140512Z-kata-7f3ac1/ ends in the first six hex digits of the run's fingerprint; `latest`
beside it points to the newest complete one. Nothing is overwritten and nothing is asked.
"""

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

from filelock import FileLock, Timeout

from stages.errors import BadInput, UsageError
from stages.runs import manifest as manifests
from stages.runs.manifest import Manifest

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
