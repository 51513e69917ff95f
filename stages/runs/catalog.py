"""The runs below an artifacts folder: find one by a user's words, choose what a stage reads, follow what was read.

`composer show`, `status`, `query`, `report`, `view` and the stages' `--from` all look runs up here.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from stat import S_ISREG
from typing import Any

from composer_stages import STAGES, stage_order
from composer_stages.errors import BadInput, ComposerError, UsageError
from composer_stages.runs import bucket
from composer_stages.runs.kinds import CHECKPOINT, NOOP, REFERENCE, Kind
from composer_stages.runs.run import InputRef, Inputs, Manifest, Run, RunFacts, read_manifest
from composer_stages.runs.stage import Stage, load_stage
from composer_stages.words import Sentence

TRAINING = "train"
"""The stage whose runs hold rollouts beside what they were made for."""


def manifests(root: Path) -> list[tuple[str, os.stat_result]]:
    """Return `stage/folder` and the status of the manifest of all runs, in the order of the stages, oldest first."""
    listing = []
    for stage in _folders(root, named=True):
        for run in _folders(stage.path, named=stage.name in STAGES):
            with suppress(OSError):  # of a folder without a manifest, or one that may not be read
                if not run.is_symlink() and S_ISREG((status := os.stat(f"{run.path}/manifest.json")).st_mode):
                    listing.append(((stage_order(stage.name), run.name), f"{stage.name}/{run.name}", status))
    return [(name, status) for _, name, status in sorted(listing, key=itemgetter(0))]


def _folders(folder: Path | str, named: bool) -> list[os.DirEntry[str]]:
    """Return the folders of a folder, none where there is none; one that cannot be looked at hides no others.

    named: raise `UsageError` where the folder cannot be read.
    """
    listed = list[os.DirEntry[str]]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):  # a loop of links, or a link into a folder of somebody else
                    listed += [entry] if entry.is_dir() else []
    except OSError as error:
        if named and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise UsageError("runs.folder-not-readable", folder=folder, strerror=error.strerror) from None
    return listed


def folders(root: Path) -> list[Path]:
    """Return all run folders below the artifacts folder, in the same order."""
    return [root / name for name, _ in manifests(root)]


def name(run: Path) -> str:
    """Return `stage/folder`, the name of a run below the artifacts folder."""
    return f"{run.parent.name}/{run.name}"


def find(root: Path, text: str) -> Path:
    """Return the run folder that a user's words mean: a folder, a name or part of it, a stage for its latest run.

    A run in a bucket is fetched into `remote` below the artifacts folder. Raises `BadInput` when there is none,
    `UsageError` when several fit.
    """
    if bucket.is_address(text):
        return bucket.fetch(text, root / "remote")
    folder = Path(text)
    if folder.is_file():
        if folder.suffix == ".gguf":
            raise BadInput("runs.model-instead-of-run", folder=folder)
        raise BadInput("runs.file-instead-of-run", folder=folder)
    # A folder that is called like a stage, such as the user's own `train`, hides no runs.
    if folder.is_dir() and not (text in STAGES and latest(root, text) and not (folder / "manifest.json").is_file()):
        return folder / "latest" if (folder / "latest" / "manifest.json").is_file() else folder
    paths = folders(root)
    if text in STAGES and (newest := latest(root, text)) is not None:
        return newest
    fitting = [run for run in paths if text in (run.name, name(run))] or [run for run in paths if text in name(run)]
    if not fitting:
        words = [*dict.fromkeys(run.parent.name for run in paths), *map(name, paths)]
        if text in STAGES and text not in words:
            raise BadInput("runs.no-run-of-stage", stage=text, root=root)
        raise BadInput("runs.no-run", text=text, root=root, words=words)
    if len(fitting) > 1:
        some = ", ".join(map(name, fitting[-3:]))
        raise BadInput("runs.several-runs-fit", num_fitting=len(fitting), text=text, some=some)
    return fitting[0]


def latest(root: Path, stage: str, usable: Callable[[Manifest], bool] = lambda record: True) -> Path | None:
    """Return the newest finished run of a stage: the target of `latest`, or the last by name where that was deleted.

    usable: runs for whose record it returns False are left out.
    """
    # `latest` is a link, which may point to a folder that was deleted since.
    linked = (root / stage / "latest").resolve()
    if (linked / "manifest.json").is_file():
        try:
            if usable(read_manifest(linked)):
                return linked
        except BadInput:
            return linked  # damage is reported when the run is read
    for path in sorted((p.parent for p in (root / stage).glob("*/manifest.json")), reverse=True):
        with suppress(BadInput):
            record = None if path.is_symlink() else read_manifest(path)
            if record is not None and record.status == "complete" and usable(record):
                return path
    return None


def unfinished_since(run: Path) -> Run | None:
    """Return the newest run of the same stage that began after a run and is not complete; None without one."""
    for path in sorted(folders(run.parent.parent), reverse=True):
        if path.parent.name == run.parent.name and path.name > run.name:
            with suppress(BadInput):
                if (newest := Run(path)).manifest.status != "complete":
                    return newest
    return None


# The inputs of a stage.


def choose(
    stage: str, names: Sequence[str], root: Path, notify: Callable[[str], None], *, unasked: bool = True
) -> Inputs:
    """Return the inputs of a stage: the runs that were named, or else the latest of the stages that write its inputs.

    Where one of the latest, or one that was named, was made from a run that fits another slot, that run is read: pairs
    come from the rollouts that the teachers answered. Rollouts of a training are read only where they are named, and
    those of the policies `reference` and `noop` only where there are no others. Optional inputs and those that take
    many runs are never chosen unasked; none is without `unasked`.
    """
    loaded = load_stage(stage)
    if names and not loaded.inputs:
        raise UsageError("runs.stage-reads-no-runs", stage=stage, given=names[0])
    if names:
        named = [run for text in names for run in _each_seed(root, text, loaded, notify)]
        return assign_inputs(loaded, [*named, *_read_by_named(loaded, named, root, notify)])
    if not unasked:
        return Inputs()
    needed = {name: slot.kind for name, slot in loaded.inputs.items() if not (slot.many or slot.optional)}
    first = sorted(needed, key=lambda name: min(map(stage_order, writers(needed[name]))))
    newest = {name: _newest(root, needed[name]) for name in first}
    for name in (name for name in needed if not newest[name]):
        training = latest(root, TRAINING)
        raise BadInput(
            "runs.no-finished-input",
            stage=stage,
            plural=needed[name].plural,
            root=root,
            writers=writers(needed[name]),
            training=training if training and Run(training).holds(needed[name]) else None,
        )
    chosen: dict[str, tuple[Run, str]] = {}  # by slot, with the reason
    for name in reversed(first):  # runs of later stages say what they were made from
        read = _read_by([run for run, _ in chosen.values()], needed[name], root)
        # Names begin with the time.
        chosen[name] = read or (Run(max(newest[name], key=lambda path: path.name)), "the latest")
    in_order = {chosen[name][0].path: chosen[name] for name in needed}
    for path, (_, reason) in in_order.items():
        notify(Sentence("runs.input-chosen", stage=stage, path=path, reason=reason))
    return assign_inputs(loaded, [run for run, _ in in_order.values()])


def _each_seed(root: Path, text: str, stage: Stage[Any], notify: Callable[[str], None]) -> list[Run]:
    """Return the run that a user's words mean; for "train", all that differ in the seed where `seeds` began the latest.

    A stage that takes one checkpoint reads the latest. `BadInput` where fewer are complete than were asked for last.
    """
    run = Run(find(root, text))
    several = any(slot.many and slot.kind is CHECKPOINT for slot in stage.inputs.values())
    if text != TRAINING or not several or _seeds(run) == 1:
        return [run]

    def work(record: Manifest) -> Any:
        read = [ref.content for ref in references(record)]
        return record.stage_version, {**record.identity, "seed": None}, read

    together = dict[str, Run]()  # by the work: what was done twice counts once
    for path in sorted((root / TRAINING).glob("*/manifest.json")):
        with suppress(BadInput):
            record = None if path.parent.is_symlink() else read_manifest(path.parent)
            if record and record.status == "complete" and work(record) == work(run.manifest):
                together[record.fingerprint] = Run(path.parent)
    # A later call for fewer seeds has told its own so, and not the rest; those of one seed were begun alone.
    count = min(seeds for seeds in map(_seeds, [run, *together.values()]) if seeds > 1)
    if len(together) < count:
        raise BadInput("runs.seeds-incomplete", stage=stage.name, complete=len(together), asked=count, path=run.path)
    chosen = sorted(together.values(), key=lambda each: each.manifest.config["seed"])
    seeds = [each.manifest.config["seed"] for each in chosen]
    notify(Sentence("runs.seeds-chosen", stage=stage.name, seeds=seeds, path=run.path))
    return chosen


def _seeds(run: Run) -> int:
    """Return how many trainings were last asked for together with this one."""
    return int(run.manifest.config.get("seeds", 1))


def assign_inputs(stage: Stage[Any], runs: Sequence[Run]) -> Inputs:
    """Assign each run to the slots whose kind it holds; `BadInput` when a slot stays empty or a run fits none."""
    filled: dict[str, list[Run]] = {}
    needed = {slot.kind.name for slot in stage.inputs.values()}
    for run in runs:
        if needed.intersection(kind.name for kind in _written(run)):
            require_complete(run)
    for name, slot in stage.inputs.items():
        fitting = [run for run in runs if run.holds(slot.kind)]
        if len(fitting) > 1 and not slot.many:
            raise BadInput(
                "runs.several-inputs-of-kind",
                stage_name=stage.name,
                plural=slot.kind.plural,
                num_fitting=len(fitting),
                fitting=[str(r.path) for r in fitting],
            )
        # `unless`: an export of pairs or of a checkpoint, for example, reads no rollouts.
        spared = any(run.holds(kind) for run in runs for kind in slot.unless)
        if not fitting and not slot.optional and not spared:
            raise BadInput("runs.input-kind-missing", stage_name=stage.name, plural=slot.kind.plural)
        if fitting:
            filled[name] = fitting
    used = [run for fitting in filled.values() for run in fitting]
    for run in runs:
        if run not in used:
            tables = ", ".join(run.manifest.outputs or [kind.plural for kind in _written(run)])
            raise BadInput(
                "runs.input-of-no-use",
                run_path=run.path,
                stage=run.manifest.stage,
                held=tables,
                stage_name=stage.name,
                inputs=[(slot.kind.plural, writers(slot.kind)) for slot in stage.inputs.values()],
            )
    return Inputs(filled)


def _written(run: Run) -> list[Kind]:
    """Return the kinds that the stage of a run writes, whether or not it has finished."""
    stage = run.manifest.stage
    return [*load_stage(stage).outputs.values()] if stage in STAGES else []


def check_inputs(inputs: Inputs) -> None:
    """Raise `BadInput` for inputs that are unfinished, damaged, or of a newer version of their stage."""
    for run in inputs.runs():
        require_complete(run)
        # The version of a stage that this program does not have cannot be compared; tables are checked by their kinds.
        now = load_stage(run.manifest.stage).version if run.manifest.stage in STAGES else None
        if now is not None and run.manifest.stage_version > now:
            raise BadInput(
                "runs.stage-version-too-new",
                run_path=run.path,
                stage_version=run.manifest.stage_version,
                stage=run.manifest.stage,
                now=now,
            )
        if damage := run.damage():
            raise BadInput("runs.run-damaged", run_path=run.path, damage=damage)


def require_complete(run: Run) -> None:
    """Raise `BadInput` for a run that is not complete, with how far it has come."""
    if run.manifest.status != "complete":
        done = progress(run)
        raise BadInput(
            "runs.input-incomplete",
            run_path=run.path,
            status=run.manifest.status,
            progress=done,
            stage=run.manifest.stage,
        )


def progress(run: Run, done: int | None = None) -> str:
    """Return how much of the planned work of an unfinished run is done: "5 of 12 rollouts done".

    Empty for a complete run, and where the plan cannot be made again. done: the units, where they were counted already.
    """
    m = run.manifest
    if m.status == "complete" or m.stage not in STAGES:
        return ""
    # The plan is made again: a run writes its manifest when it begins and when it ends.
    with suppress(ComposerError, OSError, ValueError):  # an input that was deleted, settings of another version
        stage, root = load_stage(m.stage), run.path.parents[1]
        inputs = {slot: [Run(find_input(root, Path(ref.path))) for ref in refs] for slot, refs in m.inputs.items()}
        plan = stage.plan(Inputs(inputs), stage.config(**m.config))
        if m.stage == TRAINING:  # it plans steps, and its units are of steps with rollouts alone
            done = len((run.read_file("metrics.jsonl") or b"").splitlines())
        elif done is None:
            done = sum(not unit.get("failed") for unit in run.units())
        return f"{done:,} of {m.counts.get('planned', plan.units):,} {plan.what} done"
    return ""


def writers(kind: Kind) -> list[str]:
    """Return the stages that write this kind.

    Training only where no other of the pipeline does: its rollouts were played to learn. Those of the probe only where
    no other does: their checkpoints are no models.
    """
    makers = [
        stage for stage in STAGES if any(output.name == kind.name for output in load_stage(stage).outputs.values())
    ]
    core = [stage for stage in makers if STAGES[stage].group != "probe"]
    return [stage for stage in core if stage != TRAINING] or core or makers


def _newest(root: Path, kind: Kind) -> list[Path]:
    """Return the newest run of each stage that writes this kind: those of models, or else of any policy."""

    def found(*usable: Callable[[Manifest], bool]) -> list[Path]:
        return [path for stage in writers(kind) if (path := latest(root, stage, *usable)) is not None]

    return found(lambda record: (record.config.get("policy") or {}).get("model") not in (REFERENCE, NOOP)) or found()


def _read_by_named(stage: Stage[Any], named: Sequence[Run], root: Path, notify: Callable[[str], None]) -> list[Run]:
    """Return the runs that these were made from, for the required slots that none of these fills."""
    inputs: list[Run] = []
    named = [run for run in named if any(run.holds(slot.kind) for slot in stage.inputs.values())]
    for slot in stage.inputs.values():
        filled = any(run.holds(kind) for run in named for kind in (slot.kind, *slot.unless))
        if not (slot.optional or filled) and (read := _read_by(named, slot.kind, root)):
            notify(Sentence("runs.input-chosen", stage=stage.name, path=read[0].path, reason=read[1]))
            inputs.append(read[0])
    return inputs


def _read_by(runs: Sequence[Run], kind: Kind, root: Path) -> tuple[Run, str] | None:
    """Return the run of this kind that one of these was made from, with that as the reason; None where none is left."""
    for run in runs:
        for ref in references(run.manifest):
            # Of a folder of artifacts that was copied, the copy is meant.
            places = (root / name(Path(ref.path)), Path(ref.path))
            path = next((folder for folder in places if (folder / "manifest.json").is_file()), None)
            if path is not None and (input_run := Run(path)).holds(kind):
                return input_run, f"which {name(run.path)} was made from"
    return None


# The runs that a run read.


def references(record: RunFacts) -> list[InputRef]:
    """Return the manifest's references to the runs that were read, slot by slot."""
    return [ref for refs in record.inputs.values() for ref in refs]


def find_input(root: Path, recorded: Path) -> Path:
    """Return the folder of an input: the recorded one, or that of its name below `root` where folders were moved."""
    folder = root / name(recorded)
    return recorded if (recorded / "manifest.json").is_file() or not (folder / "manifest.json").is_file() else folder
