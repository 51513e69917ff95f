"""The runs below an artifacts folder: find one, choose a stage's inputs, list all with their status, follow inputs.

`composer show`, `status`, `query`, `report`, `view` and the stages' `--from` all look runs up here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stages import STAGES, command_words, stage_order
from stages.errors import BadInput, UsageError
from stages.policy.base import NOOP, REFERENCE
from stages.runs import bucket, runner
from stages.runs.kinds import Kind
from stages.runs.run import Check, InputRef, Inputs, Manifest, Run, read_manifest
from stages.runs.stage import TRAINING, Stage, assign_inputs, commands, load_stage, writers


def folders(root: Path) -> list[Path]:
    """Return all run folders below the artifacts folder, in the order of the stages, oldest first."""
    found = [path.parent for path in root.glob("*/*/manifest.json") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: (stage_order(path.parent.name), path.name))


def readable(root: Path) -> list[Run]:
    """Return all runs whose manifest can be read, in the same order."""
    found = []
    for folder in folders(root):
        try:
            found.append(Run(folder))
        except BadInput:
            continue
    return found


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
    if folder.is_dir():
        return folder / "latest" if (folder / "latest" / "manifest.json").is_file() else folder
    every = folders(root)
    if text in STAGES and (newest := latest(root, text)) is not None:
        return newest
    fitting = [run for run in every if text in (run.name, name(run))] or [run for run in every if text in name(run)]
    if not fitting:
        words = [*dict.fromkeys(run.parent.name for run in every), *map(name, every)]
        if text in STAGES and text not in words:
            raise BadInput(f"There is no run of {text} in {root} yet. `{command_words(text)}` makes one.")
        near = [f" Did you mean {one!r}?" for one in get_close_matches(text, words, 1)]
        raise BadInput(
            f"There is no run {text!r}, neither a folder nor in {root}.{''.join(near)} "
            "`composer status` lists the runs there are."
        )
    if len(fitting) > 1:
        some = ", ".join(map(name, fitting[-3:]))
        raise BadInput(f"{len(fitting)} runs fit {text!r}, for example {some}. Give more of the name.")
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
            return linked  # whoever reads it says what is damaged
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
                if (found := Run(path)).manifest.status != "complete":
                    return found
    return None


def _of_a_model(record: Manifest) -> bool:
    """Return whether a model played, and not the tasks' own solutions or nobody."""
    return (record.config.get("policy") or {}).get("model") not in (REFERENCE, NOOP)


def _newest(root: Path, kind: Kind) -> list[Path]:
    """Return the newest run of each stage that writes this kind: those of models, or else of any policy."""

    def found(*usable: Callable[[Manifest], bool]) -> list[Path]:
        return [path for stage in writers(kind) if (path := latest(root, stage, *usable)) is not None]

    return found(_of_a_model) or found()


def choose(stage: str, given: Sequence[str], root: Path, notify: Callable[[str], None]) -> Inputs:
    """Return the inputs of a stage: the runs that were named, or else the latest of the stages that write its inputs.

    Where one of the latest, or one that was named, was made from a run that fits another slot, that run is read: pairs
    come from the rollouts that the teachers answered. Rollouts of a training are read only where they are named, and
    those of the policies `reference` and `noop` only where there are no others. Optional inputs and those that take
    many runs are never chosen unasked.
    """
    loaded = load_stage(stage)
    if given and not loaded.inputs:
        raise UsageError(f"{stage} reads no runs. Leave out --from {given[0]}.")
    if given:
        named = [Run(find(root, text)) for text in given]
        return assign_inputs(loaded, [*named, *_read_by_named(loaded, named, root, notify)])
    wanted = {name: slot.kind for name, slot in loaded.inputs.items() if not (slot.many or slot.optional)}
    first = sorted(wanted, key=lambda name: min(map(stage_order, writers(wanted[name]))))
    newest = {name: _newest(root, wanted[name]) for name in first}
    for name in (name for name in wanted if not newest[name]):
        training = latest(root, TRAINING)
        held = training is not None and Run(training).holds(wanted[name])
        raise BadInput(
            f"{stage} needs {wanted[name].plural}, and there is no finished run in {root} that holds them. "
            f"Run {commands(wanted[name])} first, "
            f"or give a run with --from FOLDER{f', such as the training {training}' if held else ''}."
        )
    chosen: dict[str, tuple[Run, str]] = {}  # by slot, with the reason
    for name in reversed(first):  # runs of later stages say what they were made from
        read = _read_by([run for run, _ in chosen.values()], wanted[name], root)
        # Names begin with the time.
        chosen[name] = read or (Run(max(newest[name], key=lambda path: path.name)), "the latest")
    in_order = {chosen[name][0].path: chosen[name] for name in wanted}
    for path, (_, reason) in in_order.items():
        notify(f"{stage}: reads {path} ({reason}; --from chooses another)")
    return assign_inputs(loaded, [run for run, _ in in_order.values()])


def _read_by_named(stage: Stage[Any], named: Sequence[Run], root: Path, notify: Callable[[str], None]) -> list[Run]:
    """Return the runs that these were made from, for the required slots that none of these fills."""
    found: list[Run] = []
    named = [run for run in named if any(run.holds(slot.kind) for slot in stage.inputs.values())]
    for slot in stage.inputs.values():
        filled = any(run.holds(kind) for run in named for kind in (slot.kind, *slot.unless))
        if not (slot.optional or filled) and (read := _read_by(named, slot.kind, root)):
            notify(f"{stage.name}: reads {read[0].path} ({read[1]}; --from chooses another)")
            found.append(read[0])
    return found


def _read_by(runs: Sequence[Run], kind: Kind, root: Path) -> tuple[Run, str] | None:
    """Return the run of this kind that one of these was made from, with that as the reason; None where none is left."""
    for run in runs:
        for ref in references(run.manifest):
            # Of a folder of artifacts that was copied, the copy is meant.
            places = (root / name(Path(ref.path)), Path(ref.path))
            path = next((place for place in places if (place / "manifest.json").is_file()), None)
            if path is not None and (found := Run(path)).holds(kind):
                return found, f"which {name(run.path)} was made from"
    return None


# The runs that a run read, and those that read it.


def references(record: Manifest) -> list[InputRef]:
    """Return the manifest's references to the runs that were read, slot by slot."""
    return [ref for refs in record.inputs.values() for ref in refs]


def find_input(root: Path, recorded: Path) -> Path:
    """Return the folder of an input: the recorded one, or that of its name below `root` where folders were moved."""
    there = root / name(recorded)
    return recorded if (recorded / "manifest.json").is_file() or not (there / "manifest.json").is_file() else there


def readers_of(root: Path, run: Run) -> list[Run]:
    """Return the runs that read this one, oldest first."""
    # By fingerprint and name, not by path: artifacts folders are moved and copied.
    wanted = (run.manifest.fingerprint, run.path.name)
    return [
        one
        for one in readable(root)
        if wanted in {(ref.fingerprint, Path(ref.path).name) for ref in references(one.manifest)}
    ]


def with_ancestors(ends: Sequence[Run]) -> list[Run]:
    """Return these runs and all that they were made from, in the order of the stages.

    Inputs that were deleted are left out: the manifest that names them says so. Raises `BadInput` for a complete run
    whose files are damaged.
    """
    found: dict[Path, Run] = {}
    pending = list(ends)
    while pending:
        run = pending.pop(0)
        if run.path in found:
            continue
        if found_damage := damage(run, "tables"):
            raise BadInput(f"{run.path}: {found_damage}. {REPAIR}")
        found[run.path] = run
        root = run.path.resolve().parents[1]
        paths = [find_input(root, Path(ref.path)) for ref in references(run.manifest)]
        pending[:0] = [Run(path) for path in paths if (path / "manifest.json").is_file()]
    return sorted(found.values(), key=lambda run: (stage_order(run.manifest.stage), run.path.name))


# The list of runs, for `composer status` and the first page of `composer view`.


@dataclass(frozen=True)
class RunLine:
    """One run in a list. `reason` is empty when the run is complete, up to date, and passed its own checks."""

    run: str
    status: str
    began: str = ""
    age_s: float = 0.0
    done: int = 0
    planned: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    device: str = ""
    """Where it runs or ran."""
    reason: str = ""


FAILED_CHECKS = "it did not pass its own checks"
REPAIR = "Rerun that stage, or restore the file."
DAMAGED = "damaged"
"""The status of a complete run whose files are not those that were written."""


def lines(root: Path, *, versions: bool = True, check: Check = "sizes") -> list[RunLine]:
    """List every run below the artifacts folder, in the order of the stages, oldest first.

    versions: whether a run counts as out of date for its stage's newer version, which imports every stage there is.
    check: how thoroughly the files are compared with the manifest, as `Run.damage` takes it.
    """
    found = []
    for folder in folders(root):
        try:
            run = Run(folder)
            record, found_damage = run.manifest, damage(run, check)
        except BadInput as error:
            found.append(RunLine(name(folder), "unreadable", reason=str(error)))
            continue
        began, planned = datetime.fromisoformat(record.started_at), record.counts.get("planned", 0)
        line = RunLine(
            run=name(folder),
            status=DAMAGED if found_damage else record.status,
            began=record.started_at,
            age_s=(datetime.now(UTC) - began).total_seconds(),
            done=record.counts.get("done", planned if record.status == "complete" else 0),
            planned=planned,
            cost_usd=record.cost_usd,
            seconds=record.seconds,
            device=record.device,
            reason="; ".join(filter(None, [found_damage, reason(folder, record, versions)])),
        )
        found.append(line)
    return found


def reason(folder: Path, record: Manifest, versions: bool = False) -> str:
    """Return why a run is not complete, or no longer up to date; empty when it is both."""
    if record.status == "running":
        try:
            # Only the process that works in a folder holds its lock: no process, no lock, whatever the manifest says.
            with runner.locked(folder):
                return "its process ended without finishing; --resume goes on"
        except UsageError:  # another process holds the folder
            return "in progress"
    if record.status != "complete":
        return record.reason
    reasons = [FAILED_CHECKS] if record.outcome.ok is False else []
    for ref in references(record):
        path = find_input(folder.resolve().parents[1], Path(ref.path))
        if not (path / "manifest.json").is_file():
            reasons.append(f"its input {name(path)} was deleted")
            continue
        try:
            if read_manifest(path).content != ref.content:
                reasons.append(f"its input {name(path)} has changed since")
        except BadInput:
            reasons.append(f"its input {name(path)} is unreadable")
    if versions and record.stage in STAGES and record.stage_version < (now := load_stage(record.stage).version):
        reasons.append(f"{record.stage} was version {record.stage_version} and is now {now}")
    return "; ".join(reasons)


def damage(run: Run, check: Check = "sizes") -> str:
    """Return the first damaged file of a run in words; empty without one."""
    if run.manifest.status == "complete":
        return run.damage(check) or ""
    if check == "bytes":  # an unfinished run has no digests yet; its units have checksums in their gzip files
        try:
            for _ in run.units():
                pass
        except BadInput as error:
            return str(error)
    return ""
