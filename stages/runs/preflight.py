"""What a run would stumble over before its first unit, found without one: for `--dry-run`."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.errors import UsageError
from stages.runs import folders, runner
from stages.runs.artifact import Run
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs

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
    work = runner.located(stage, inputs, config, root=root, out=out)
    if work.existing and not clean:
        with folders.locked(work.folder):
            if runner.finished(work):
                return [f"{work.folder} is complete and up to date: there is nothing to do"]
            runner.refuse(work, resume=resume)
    count = sum(1 for _ in inputs.runs())
    read = [f"{count} input run{'s' if count > 1 else ''}: complete, and as they were written"] if count else []
    return [*read, *config.check(), room(work.folder)]


def room(folder: Path) -> str:
    """How much may be written below a folder that need not exist yet; `UsageError` where that is next to nothing."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    folders.try_writing(place)
    free = shutil.disk_usage(place).free
    if free < ROOM_BYTES:
        raise UsageError(
            f"{place} has room for {free / 2**20:.0f} MiB only. Free some, or choose another --artifacts or --out."
        )
    return f"{place} can be written to, {free / 2**30:,.1f} GiB free"
