"""Pairs as rows, from a preference and the state it was found in; and all pairs of a group of rollouts on one task."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stages.envs.base import Task
from stages.pairs import groups, submissions
from stages.pairs.groups import Choice
from stages.pairs.submissions import SubmissionVerdict
from stages.pairs.voting import Preference
from stages.rollouts.episode import state_sha256
from stages.rollouts.reading import step_groups
from stages.rollouts.states import COLUMNS, opening_row, state_id, state_rows
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import STEP, Row

IN_WORDS = "task"
"""In the place of a step in the name of a state before anything was done."""


def pair_id(state_sha256: str, chosen: str, rejected: str) -> str:
    """The name of a pair: one for the same preference in the same state."""
    return store.digest([state_sha256, chosen, rejected])[:24]


def pair_row(
    preference: Preference,
    task: Task,
    step: Row,
    *,
    state: str,
    num_teachers: int,
    compared_by: str,
) -> Row:
    """One `pair/4` row of imported groups.

    `step` names the rollout, the step and the digest of the state, `state` its row of `states`.
    """
    return {
        "pair_id": pair_id(step["state_sha256"], preference.chosen, preference.rejected),
        "rule": preference.rule,
        "rollout_id": step["rollout_id"],
        "task_id": task.task_id,
        "family": task.family,
        "step": step["step"],
        "state_sha256": step["state_sha256"],
        "state_id": state,
        "chosen": preference.chosen,
        "rejected": preference.rejected,
        "rejected_by": preference.rejected_by,
        "votes_chosen": preference.votes_chosen,
        "votes_rejected": preference.votes_rejected,
        "num_teachers": num_teachers,
        "compared_by": compared_by,
        "chosen_by": None,
        "served_models": None,
        "cost_usd": None,
    }


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rollout or step rows grouped by task; a task without any has none."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["task_id"]].append(row)
    return grouped


def of_group(
    task: Task, rollouts: Sequence[Row], steps: Sequence[Row], submitted: Mapping[str, str | None], student: str | None
) -> Row:
    """All pairs of one task, each once, what was dropped by reason, and how many states several rollouts shared."""
    dropped: Counter[str] = Counter()
    pairs: dict[str, Row] = {}
    crossing_states = groups.crossings(steps, rollouts)
    candidates: list[Row] = []
    for visits in crossing_states:
        choices, reasons = groups.choose(visits, student)
        dropped += reasons
        candidates += [_in_state(choice, task) for choice in choices]
    verdicts, reasons = submissions.compare(rollouts, submitted, student)
    dropped += reasons
    dropped["task_without_words"] += 0 if task.prompt else len(verdicts)
    candidates += [_in_task(verdict, task) for verdict in verdicts if task.prompt]
    for row in candidates:
        dropped["duplicate"] += row["pair_id"] in pairs
        pairs.setdefault(row["pair_id"], row)
    shared = sum(len(visits) > 1 for visits in crossing_states)
    return {"pairs": list(pairs.values()), "dropped": dict(+dropped), "states": len(crossing_states), "shared": shared}


def _in_state(choice: Choice, task: Task) -> Row:
    return pair_row(
        choice.preference,
        task,
        choice.at.step,
        state=state_id(choice.at.step),
        num_teachers=choice.num_others,
        compared_by=choice.compared_by,
    )


def _in_task(verdict: SubmissionVerdict, task: Task) -> Row:
    """The state before anything was done: the task in its own words."""
    digest = task_state(task)["state_sha256"]
    start = {"rollout_id": verdict.rollout["rollout_id"], "step": 0, "state_sha256": digest}
    return pair_row(
        verdict.preference,
        task,
        start,
        state=task_state(task)["state_id"],
        num_teachers=verdict.num_others,
        compared_by="reward",
    )


def task_state(task: Task) -> Row:
    """The `state/1` row of a task in its own words."""
    messages = [{"role": "user", "content": task.prompt}]
    return opening_row(f"{task.task_id}/{IN_WORDS}", messages, state_sha256(messages))


class Named:
    """The states that pairs name: of every rollout those up to the last one, and tasks in their own words."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._tasks = set[str]()

    def add(self, name: str) -> None:
        """One `state_id`."""
        owner, _, step = name.rpartition("/")
        if step == IN_WORDS:
            self._tasks.add(owner)
        else:
            self._last[owner] = max(self._last.get(owner, 0), int(step))

    def rows(self, rollouts: Run, tasks: Iterable[Task] = ()) -> Iterator[Row]:
        """Their `state/1` rows, with all that they go on from; the steps of a run are read once."""
        for steps in step_groups(rollouts.scan(STEP).rows(COLUMNS)):
            if steps[0]["rollout_id"] in self._last:
                yield from state_rows(steps, self._last[steps[0]["rollout_id"]])
        yield from (task_state(task) for task in tasks if task.task_id in self._tasks)
