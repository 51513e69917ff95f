"""What a stage reads: giving runs to input slots, and refusing runs that are unfinished, damaged or of no use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from stages import STAGES, typed
from stages.errors import BadInput
from stages.runs.artifact import Run
from stages.runs.kinds import Kind
from stages.runs.manifest import InputRef
from stages.runs.records import KINDS


@dataclass(frozen=True)
class Slot:
    """One input of a stage: the kind it needs, whether several runs may fill it, and whether it may stay empty.

    `optional` lets it stay empty always, `unless` where a run was given that holds one of these kinds.
    """

    kind: Kind
    many: bool = False
    optional: bool = False
    unless: tuple[Kind, ...] = ()


class Inputs(dict[str, list[Run]]):
    """The runs of a stage by the name of the slot that they fill. A slot that stays empty is absent."""

    def __init__(self, given: Mapping[str, Run | Sequence[Run]] | None = None) -> None:
        super().__init__({name: [one] if isinstance(one, Run) else list(one) for name, one in (given or {}).items()})

    def one(self, slot: str) -> Run:
        """The only run of a slot; `KeyError` when it is empty."""
        (run,) = self[slot]
        return run

    def optional(self, slot: str) -> Run | None:
        """The only run of a slot that may stay empty."""
        return self.one(slot) if slot in self else None

    def many(self, slot: str) -> list[Run]:
        """All runs of a slot, none when it is empty."""
        return self.get(slot, [])

    def runs(self) -> Iterator[Run]:
        """Every run, slot by slot."""
        return (run for runs in self.values() for run in runs)


def assign(stage: str, slots: Mapping[str, Slot], runs: Sequence[Run]) -> Inputs:
    """Give each run to the slots whose kind it holds; `BadInput` when a slot stays empty or a run fits nowhere."""
    filled: dict[str, list[Run]] = {}
    for name, slot in slots.items():
        fitting = [run for run in runs if run.holds(slot.kind)]
        if len(fitting) > 1 and not slot.many:
            raise BadInput(
                f"{stage} needs one run with {slot.kind}, but {len(fitting)} were given: "
                f"{', '.join(str(r.path) for r in fitting)}."
            )
        spared = any(run.holds(kind) for run in runs for kind in slot.unless)
        if not fitting and not slot.optional and not spared:
            raise BadInput(
                f"{stage} needs a run that holds {slot.kind} ({name}). Give it with --from FOLDER; "
                "`composer status` lists the runs."
            )
        if fitting:
            filled[name] = fitting
    used = [run for fitting in filled.values() for run in fitting]
    for run in runs:
        if run not in used:
            held = ", ".join(out["kind"] for out in run.manifest.outputs.values()) or "nothing"
            raise BadInput(
                f"{run.path} holds {held}; {stage} has no use for it. "
                f"It needs {', '.join(str(s.kind) for s in slots.values())}."
            )
    return Inputs(filled)


def references(inputs: Inputs) -> dict[str, list[InputRef]]:
    """What the manifest keeps of the inputs."""
    return {
        name: [
            InputRef(
                stage=r.manifest.stage, path=str(r.path), fingerprint=r.manifest.fingerprint, content=r.manifest.content
            )
            for r in runs
        ]
        for name, runs in inputs.items()
    }


def check(inputs: Inputs) -> None:
    """Refuse inputs that are unfinished or damaged."""
    for run in inputs.runs():
        if run.manifest.status != "complete":
            raise BadInput(
                f"{run.path} is {run.manifest.status}, not complete. "
                f"Finish it first: `{typed(run.manifest.stage)} --resume`."
            )
        now = import_module(STAGES[run.manifest.stage].module).VERSION if run.manifest.stage in STAGES else None
        if now is not None and run.manifest.stage_version > now:
            raise BadInput(
                f"{run.path} was written by version {run.manifest.stage_version} of {run.manifest.stage}, newer than "
                f"{now}, which this Composer has. Update Composer."
            )
        if damage := run.damage():
            raise BadInput(f"{run.path}: {damage}. Rerun that stage, or restore the file.")


def kinds_of(run: Run) -> list[Kind]:
    """The kinds of all outputs of a run that this program knows."""
    return [
        KINDS[out["kind"].partition("/")[0]]
        for out in run.manifest.outputs.values()
        if out["kind"].partition("/")[0] in KINDS
    ]
