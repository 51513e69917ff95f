"""Groups of rollouts on one task: which of them were in the same state, and what votes and rewards say about it.

Two rollouts are in the same state when they began with the same messages and have since done the same (by canonical
form) and seen the same. What they thought aside may differ; a pair's context is that of the rejected side, or of the
student where one is named.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from stages.envs.base import Task
from stages.pairs.voting import Ballot, Preference, canonical, canonical_answer, canonical_command, decide
from stages.rollouts.agent_loop import state_sha256
from stages.rollouts.trace import STATE_COLUMNS, by_rollout, opening_row, state_id, state_rows, states, step_groups
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import STEP, Row

LEAST_ROLLOUTS = 2
"""On each side: what a single rollout came to is as much the luck of its other steps as the work of this one."""
LEVEL = 0.05
"""Of the interval that a difference of mean rewards must leave zero out of, shared among the pairs of a state."""
LEAST_TEACHERS = 2
"""With a single other model a majority would be its opinion alone, and each of two models would outvote the other."""


@dataclass(frozen=True)
class StateVisit:
    """One rollout in a state: its step, its model and its final reward."""

    step: Row
    model: str
    reward: float | None
    form: str


@dataclass(frozen=True)
class Choice:
    """A preference in a state: the forms of its sides, in whose context it is given, and how it was found."""

    preference: Preference
    forms: tuple[str, str]
    at: StateVisit
    compared_by: str
    num_others: int


def form(step: Row) -> str:
    """What an action does: its calls or command, else the commands that its source says were run, else its text."""
    known = canonical(step["action"])
    if known is None and step["commands"]:
        known = "ran: " + "\n".join(map(canonical_command, step["commands"]))
    return known if known is not None else canonical_answer(step["action"])


def crossings(steps: Sequence[Row], rollouts: Sequence[Row]) -> list[list[StateVisit]]:
    """The states of a group's rollouts, each with all visits to it, in the order in which they were recorded."""
    about = {row["rollout_id"]: row for row in rollouts}
    visits_by_state: dict[str, list[StateVisit]] = {}
    for rollout_id, rows in by_rollout(list(steps)).items():
        for key, visit in _way(rows, about[rollout_id]):
            visits_by_state.setdefault(key, []).append(visit)
    return list(visits_by_state.values())


def _way(rows: list[Row], rollout: Row) -> Iterator[tuple[str, StateVisit]]:
    """The states that one rollout went through, each with the key of what led there."""
    key, known = store.digest(rollout["group_id"]), 0
    for row, messages in zip(rows, states(rows), strict=True):
        key = store.digest([key, messages[known:]])
        visit = StateVisit(row, rollout["model"] or "unknown", rollout["reward"], form(row))
        yield key, visit
        key, known = store.digest([key, visit.form]), len(messages) + 1


def choose(visits: Sequence[StateVisit], student: str | None) -> tuple[list[Choice], Counter[str]]:
    """The preferences in one state, by votes and by rewards, and the count of every reason for none."""
    dropped: Counter[str] = Counter()
    whole = [visit for visit in visits if not visit.step["truncated"]]
    dropped["truncated"] = len(visits) - len(whole)
    if len(whole) < 2:
        dropped["state_not_shared"] = len(whole)
        return [], +dropped
    better = list(_by_rewards(whole, student, dropped))
    voted = _consistent(list(_by_votes(whole, student, dropped)), better, dropped)
    worded = [c for c in (*voted, *better) if c.preference.chosen.strip() and c.preference.rejected.strip()]
    dropped["empty_action"] = len(voted) + len(better) - len(worded)
    return worded, +dropped


def _consistent(voted: list[Choice], better: list[Choice], dropped: Counter[str]) -> list[Choice]:
    """Votes that neither the rewards nor other votes contradict: no action is on both sides in one state."""
    won, lost = ({choice.forms[side] for choice in better} for side in (0, 1))
    kept = [c for c in voted if c.forms[0] not in lost and c.forms[1] not in won]
    dropped["contradicted_by_reward"] += len(voted) - len(kept)
    won, lost = ({choice.forms[side] for choice in kept} for side in (0, 1))
    agreed = [c for c in kept if c.forms[0] not in lost and c.forms[1] not in won]
    dropped["contradicted_by_votes"] += len(kept) - len(agreed)
    return agreed


def _by_votes(visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]) -> Iterator[Choice]:
    """Each model in turn (or one) is the student, the others are its teachers."""
    classes: dict[str, str] = {visit.step["action"]: visit.form for visit in visits}
    for visit in visits:
        if student not in (None, visit.model):
            continue
        teachers: dict[str, list[str | None]] = {}
        for other in visits:
            if other.model != visit.model:
                teachers.setdefault(other.model, []).append(other.step["action"])
        if len(teachers) < LEAST_TEACHERS:
            dropped["too_few_teachers"] += 1
            continue
        ballot = Ballot(visit.step["action"], teachers, classes)
        preferences, reason = decide(ballot)
        dropped.update([reason] if reason else [])
        for preference in preferences:
            forms = (classes[preference.chosen], classes[preference.rejected])
            yield Choice(preference, forms, visit, "canonical", len(teachers))


def _by_rewards(visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]) -> Iterator[Choice]:
    """Of two actions, the one whose rollouts ended better, where the interval of the difference says so.

    The better of one pair may be the worse of another; then neither pair is given (`both_sides_of_a_state`).
    """
    classes: dict[str, list[StateVisit]] = {}
    for visit in visits:
        if visit.reward is not None:
            classes.setdefault(visit.form, []).append(visit)
    if len(classes) < 2:
        dropped["actions_equal" if len({visit.form for visit in visits}) == 1 else "rewards_unknown"] += 1
        return
    uneven = [sorted(two, key=_mean) for two in combinations(classes.values(), 2) if _mean(two[0]) != _mean(two[1])]
    dropped["rewards_equal"] += not uneven
    wanted = [two for two in uneven if student is None or any(v.model == student for side in two for v in side)]
    several = [two for two in wanted if min(map(len, two)) >= LEAST_ROLLOUTS]
    dropped["too_few_rollouts"] += len(wanted) - len(several)
    sure = [two for two in several if _differ(*two, level=LEVEL / len(several))]
    dropped["difference_not_supported"] += len(several) - len(sure)
    chosen, rejected = ({two[side][0].form for two in sure} for side in (1, 0))
    for worse, better in sure:
        if chosen.isdisjoint({worse[0].form}) and rejected.isdisjoint({better[0].form}):
            yield _better(better, worse, student, len(visits) - 1)
        else:
            dropped["both_sides_of_a_state"] += 1


def _differ(worse: Sequence[StateVisit], better: Sequence[StateVisit], *, level: float) -> bool:
    """Whether the difference of two means is above zero, by the rearrangements of the rewards among the rollouts.

    The exact test of Fisher and Pitman, of which the interval of the difference at 1 - level is the inversion; it holds
    for rewards of any law, and finds nothing among few rollouts: 3 against 3 never come below 0.05.
    """
    from scipy.stats import permutation_test

    sides = [[visit.reward or 0.0 for visit in side] for side in (better, worse)]
    if len({*sides[0], *sides[1]}) == 2:
        return _exact(sides) <= level
    found = permutation_test(sides, _gap, vectorized=True, n_resamples=20_000, rng=0)
    return bool(found.pvalue <= level)


def _gap(better: Any, worse: Any, axis: int = -1) -> Any:
    return better.mean(axis=axis) - worse.mean(axis=axis)


def _exact(sides: Sequence[Sequence[float]]) -> float:
    """The same p-value where rewards have two values, as verdicts do."""
    from scipy.stats import fisher_exact

    high = max(max(side) for side in sides)
    return float(fisher_exact([[side.count(high), len(side) - side.count(high)] for side in map(list, sides)]).pvalue)


def _mean(visits: Sequence[StateVisit]) -> float:
    return sum(visit.reward or 0.0 for visit in visits) / len(visits)


def _better(better: Sequence[StateVisit], worse: Sequence[StateVisit], student: str | None, num_others: int) -> Choice:
    """The best of one side over the worst of the other, the student's own action where it is on a side."""
    chosen = max(better, key=lambda visit: (visit.model == student, visit.reward))
    rejected = min(worse, key=lambda visit: (visit.model != student, visit.reward))
    at = chosen if chosen.model == student else rejected
    texts = (chosen.step["action"], rejected.step["action"])
    sides = Preference("better_outcome", *texts, rejected.model, len(better), len(worse))
    return Choice(sides, (chosen.form, rejected.form), at, "reward", num_others)


# ---- submissions
# What rollouts of one task submitted, compared by the verdict: a patch that was accepted over one that was not.
#
# The context is the task alone, as the way to the answer differs from rollout to rollout.


@dataclass(frozen=True)
class SubmissionVerdict:
    """A preference between two submissions, the rollout of the rejected one, and the number of other submissions."""

    preference: Preference
    rollout: Row
    num_others: int


def compare(
    rollouts: Sequence[Row], submitted: Mapping[str, str | None], student: str | None
) -> tuple[list[SubmissionVerdict], Counter[str]]:
    """Preferences between what was submitted for one task, and reasons for none.

    Every distinct text stands for itself once; a text that was judged both ways is compared with none.
    """
    dropped: Counter[str] = Counter()
    judged: dict[str, list[Row]] = {}
    for row in rollouts:
        text = submitted.get(row["rollout_id"]) or ""
        if not text.strip():
            dropped["no_submission"] += row["gt_pass"] is not None
        elif row["reward"] is None:
            dropped["submission_not_judged"] += 1
        else:
            judged.setdefault(text, []).append(row)
    settled = {text: rows for text, rows in judged.items() if len({row["reward"] for row in rows}) == 1}
    dropped["submission_judged_both_ways"] = len(judged) - len(settled)
    verdicts = [
        _verdict(better, worse, settled)
        for better, worse in product(settled, repeat=2)
        if settled[better][0]["reward"] > settled[worse][0]["reward"]
        and (student is None or any(row["model"] == student for row in (*settled[better], *settled[worse])))
    ]
    dropped["submissions_equal"] = bool(settled) and not verdicts
    return verdicts, +dropped


def _verdict(better: str, worse: str, settled: Mapping[str, list[Row]]) -> SubmissionVerdict:
    name = settled[worse][0]["model"] or "unknown"
    sides = Preference("better_submission", better, worse, name, len(settled[better]), len(settled[worse]))
    return SubmissionVerdict(sides, settled[worse][0], len(settled) - 1)


# ---- rows
# Pairs as rows, from a preference and the state it was found in; and all pairs of a group of rollouts on one task.

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
    crossing_states = crossings(steps, rollouts)
    candidates: list[Row] = []
    for visits in crossing_states:
        choices, reasons = choose(visits, student)
        dropped += reasons
        candidates += [_in_state(choice, task) for choice in choices]
    verdicts, reasons = compare(rollouts, submitted, student)
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
        for steps in step_groups(rollouts.scan(STEP).rows(STATE_COLUMNS)):
            if steps[0]["rollout_id"] in self._last:
                yield from state_rows(steps, self._last[steps[0]["rollout_id"]])
        yield from (task_state(task) for task in tasks if task.task_id in self._tasks)
