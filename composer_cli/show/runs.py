"""Finding runs: by folder, by the name that `composer status` shows, by part of it, or as the latest of a stage."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stages import STAGES, command_words, stage_order
from stages.errors import BadInput, UsageError
from stages.runs import bucket, manifest
from stages.runs.artifact import Inputs, Run, Slot
from stages.runs.stage import assign_inputs, load_stage


def folders(root: Path) -> list[Path]:
    """All run folders below the artifacts folder, stage by stage, oldest first."""
    found = [path.parent for path in root.glob("*/*/manifest.json") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: (stage_order(path.parent.name), path.name))


def find(root: Path, text: str) -> Path:
    """The run folder that `text` means; `BadInput` when there is none, `UsageError` when several fit.

    A run in a bucket is fetched into `remote` below the artifacts folder.
    """
    if bucket.is_address(text):
        return bucket.fetch(text, root / "remote")
    place = Path(text)
    if place.is_dir():
        return place / "latest" if (place / "latest" / "manifest.json").is_file() else place
    every = folders(root)
    if text in STAGES and (newest := latest(root, text)) is not None:
        return newest
    fitting = [run for run in every if text in (run.name, name(run))] or [run for run in every if text in name(run)]
    if not fitting:
        raise BadInput(
            f"There is no run {text!r}, neither a folder nor in {root}. `composer status` lists the runs there are."
        )
    if len(fitting) > 1:
        some = ", ".join(map(name, fitting[-3:]))
        raise UsageError(f"{len(fitting)} runs fit {text!r}, for example {some}. Give more of the name.")
    return fitting[0]


def latest(root: Path, stage: str) -> Path | None:
    """The newest finished run of a stage: where `latest` points, or by the runs' names where somebody deleted that."""
    if (root / stage / "latest" / "manifest.json").is_file():
        return (root / stage / "latest").resolve()
    every = sorted((p.parent for p in (root / stage).glob("*/manifest.json")), reverse=True)
    return next((path for path in every if not path.is_symlink() and _complete(path)), None)


def _complete(path: Path) -> bool:
    try:
        return manifest.read(path).status == "complete"
    except BadInput:
        return False


def name(run: Path) -> str:
    """`stage/folder`, the name of a run below the artifacts folder."""
    return f"{run.parent.name}/{run.name}"


def choose(stage: str, given: Sequence[str], root: Path, tell: Callable[[str], None]) -> Inputs:
    """The inputs of a stage: the runs that were named, or else the latest of the stages that write what it needs."""
    loaded = load_stage(stage)
    if given and not loaded.inputs:
        raise UsageError(f"{stage} reads no runs. Leave out --from {given[0]}.")
    runs = [Run(find(root, text)) for text in given] if given else _latest(stage, loaded.inputs, root, tell)
    return assign_inputs(loaded, runs)


def _latest(stage: str, slots: Mapping[str, Slot], root: Path, tell: Callable[[str], None]) -> list[Run]:
    runs: dict[Path, Run] = {}
    for slot in slots.values():
        if slot.many or slot.optional:
            continue
        writers = [s for s in STAGES if any(kind.name == slot.kind.name for kind in load_stage(s).outputs.values())]
        found = [path for s in writers if (path := latest(root, s)) is not None]
        if not found:
            raise BadInput(
                f"{stage} needs {slot.kind}, and there is no finished run in {root} that holds it. "
                f"Run {' or '.join(f'`{command_words(writer)}`' for writer in writers)} first, "
                "or give a run with --from FOLDER."
            )
        newest = max(found, key=lambda path: path.name)  # names begin with the time
        runs[newest] = Run(newest)
    for path in runs:
        tell(f"{stage}: reads {path} (the latest; --from chooses another)")
    return list(runs.values())
