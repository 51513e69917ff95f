"""Carries out one stage: finds out whether it is done, opens its run folder, runs it, and seals the manifest last.

    result = runner.execute("collect", {}, Config(), root=Path("artifacts"))

The same call serves the command line, a preset chain and a notebook.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from stages import STAGES
from stages.backends import ranks
from stages.errors import BadInput, UsageError
from stages.runs import attempt, folders, signals, store
from stages.runs import inputs as inputs_
from stages.runs.artifact import Listener, Out, Run
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.mirror import Mirror
from stages.runs.spread import spreading


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
    inputs_.check(inputs)
    identity = config.identity()
    print_ = fingerprint(stage, identity, inputs)
    folder, existing = folders.locate(root / stage, config.label(), print_, out)
    return Work(print_, identity, folder, existing)


def standing(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Result | None:
    """The run that holds this work already, complete and undamaged; None when there is something to do."""
    work = located(stage, inputs, config, root=root, out=out)
    return finished(work) if work.existing else None


def place(stage: str, inputs: Inputs, config: StageConfig, *, root: Path, out: Path | None = None) -> Path | None:
    """The folder of the run that does or did this work; None before there is one."""
    print_ = fingerprint(stage, config.identity(), inputs)
    folder, existing = folders.locate(root / stage, config.label(), print_, out)
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
            f"{work.folder} holds a different run ({folders.difference(found.manifest, work.identity)}). "
            "Use --clean to delete it, or another --out."
        )
    if not resume:
        raise UsageError(folders.ways_out(work.folder, found.manifest, found.damage()))


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
    with ranks.join().leading(), folders.locked(folder):
        if work.existing and not clean:
            if done := finished(work):
                return done
            refuse(work, resume=resume)
        if clean and work.existing:
            folders.empty(folder)
        with spreading(on, stage, inputs, config) as spread:
            record = attempt.begin(stage, config, work.identity, work.fingerprint, inputs, folder)
            writer = Out(folder, record, cache=root / "models", max_cost=max_cost, listener=listener, spread=spread)
            units = hasattr(module(stage), "work")
            with mirror.following(writer, units=units) if mirror else nullcontext():
                try:
                    attempt.carry_out(module(stage), inputs, config, writer)
                except (UsageError, BadInput):
                    if record.attempts == 1 and not len(writer.journal) and not writer.budget.used:
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
        record = attempt.manifest_of(stage, config, config.identity(), "", inputs)
        writer = Out(Path(folder), record, cache=root / "models")
        with signals.draining(writer):
            module(stage).run(inputs, config, writer)
