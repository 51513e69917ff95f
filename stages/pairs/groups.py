"""Groups of rollouts on one task: which of them were in the same state, and what votes and rewards say about it.

Two rollouts are in the same state when they began with the same messages and have since done the same (by canonical
form) and seen the same. What they thought aside may differ; a pair's context is that of the rejected side, or of the
student where one is named.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stages.pairs.canonical import canonical, canonical_answer, canonical_command
from stages.pairs.voting import Ballot, Preference, decide
from stages.rollouts.trace import by_rollout, states
from stages.runs import store
from stages.runs.records import Row

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
