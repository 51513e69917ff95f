"""Distinct states with the teachers' actions in them, and who did what in each, by names of classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.errors import BadInput
from stages.pairs.audit import JudgedState
from stages.rollouts.trace import RecordedState, states_by_digest
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import STEP, TEACHER_ACTION, Row


@dataclass(frozen=True)
class AnsweredState:
    """A distinct state with the teachers' actions in it, one a sample; None for no answer, or one that was cut off.

    A teacher that was not asked there has no samples; it counts when majorities are taken. models: what each teacher's
    server answered with. costs: of all answers in USD, None where not known.
    """

    digest: str
    recorded: RecordedState
    teachers: dict[str, list[str | None]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    costs: list[float | None] = field(default_factory=list)

    @property
    def cost_usd(self) -> float | None:
        """What all answers cost; None where one of them has no known price."""
        known = [cost for cost in self.costs if cost is not None]
        return sum(known) if len(known) == len(self.costs) else None

    @property
    def task_id(self) -> str:
        """The task of the rollout that reached the state first."""
        return str(self.recorded.steps[0]["task_id"])


def explored(digest: str, share: float) -> bool:
    """Whether a state is in a random share of all: by its digest, so that everybody agrees on it."""
    return int(digest[:12], 16) < share * 16**12


def answered_states(rollouts: Run, answers: Run) -> list[AnsweredState]:
    """The distinct states, with the teachers' answers; `BadInput` when the answers belong to other rollouts."""
    _same_origin(rollouts, answers)
    recorded = states_by_digest(rollouts.rows(STEP))
    answered = {digest: AnsweredState(digest, state) for digest, state in recorded.items()}
    rows = answers.rows(TEACHER_ACTION)
    table = list(dict.fromkeys(row["teacher"] for row in rows))
    for state in answered.values():
        state.teachers.update({name: [] for name in table})
    for row in rows:
        whole = row["action"] if row["finish_reason"] != "length" else None
        answered[row["state_sha256"]].teachers[row["teacher"]].append(whole)
        answered[row["state_sha256"]].models[row["teacher"]] = row["served_model"] or row["model"]
        answered[row["state_sha256"]].costs.append(_cost(row))
    return list(answered.values())


def _cost(row: Row) -> float | None:
    """In USD; a call that failed without a bill cost nothing."""
    cost: float | None = row["cost_usd"]
    return 0.0 if cost is None and row["error_type"] is not None else cost


def _same_origin(rollouts: Run, answers: Run) -> None:
    asked = answers.manifest.inputs["rollouts"][0]
    if asked.content != rollouts.manifest.content:
        raise BadInput(
            f"{answers.path} answers the rollouts of {asked.path}, not those of {rollouts.path}. "
            "Give the rollouts it was asked about, or rerun replay-teachers on these."
        )


def names(state: AnsweredState, known: dict[str, str | None]) -> Row:
    """Who did what, by short names of classes that mean the same in every state."""
    short = {text: None if name is None else store.digest(name)[:16] for text, name in known.items()}
    return {
        "students": [None if step["truncated"] else short[step["action"]] for step in state.recorded.steps],
        "teachers": {name: [t and short[t] for t in texts] for name, texts in state.teachers.items()},
    }


def judged(state: AnsweredState, record: Row) -> JudgedState:
    """A state with what was done in it, by the names of classes."""
    steps = state.recorded.steps
    return JudgedState(
        task=state.task_id,
        step=steps[0]["step"],
        students=record["students"],
        rollouts=[step["rollout_id"] for step in steps],
        teachers=record["teachers"],
    )


def blindly_asked(states: Sequence[AnsweredState], answers: Run) -> list[AnsweredState]:
    """States with answers that were not asked about because of other answers: all of them, where there was no gate."""
    gate = answers.manifest.config.get("gate") or {"rule": "off"}
    asked = [state for state in states if any(state.teachers.values())]
    return asked if gate["rule"] == "off" else [state for state in asked if explored(state.digest, gate["explore"])]
