"""Groups of rollouts on one task: which of them were in the same state, and what votes and rewards say about it.

Two rollouts are in the same state when they began with the same messages and have since done the same (by canonical
form) and seen the same. What they thought aside may differ; a pair's context is that of the rejected side, or of the
student where one is named.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from stages.messages import Message
from stages.pairs.canonical import canonical, canonical_answer, canonical_command
from stages.pairs.voting import STUDENT, Ballot, Preference, decide
from stages.rollouts.trace import by_rollout, prompt_ids, states
from stages.runs import store
from stages.runs.records import Row

LEAST_TEACHERS = 2
"""With a single other model a majority would be its opinion alone, and each of two models would outvote the other."""


@dataclass(frozen=True)
class StateVisit:
    """One rollout in a state: its step, the conversation so far as messages and token ids, and its final reward."""

    step: Row
    messages: list[Message]
    prompt: list[int] | None
    model: str
    reward: float | None
    form: str

    @property
    def name(self) -> str:
        """The voter: a model, and which of its rollouts."""
        return f"{self.model}#{self.step['sample_idx']}"


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
    for row, messages, prompt in zip(rows, states(rows), prompt_ids(rows), strict=True):
        key = store.digest([key, messages[known:]])
        visit = StateVisit(row, messages, prompt, rollout["model"] or "unknown", rollout["reward"], form(row))
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
    """Votes that neither the rewards nor other votes contradict."""
    by_reward, by_vote = ({choice.forms for choice in choices} for choices in (better, voted))
    kept = []
    for choice in voted:
        reverse = choice.forms[::-1]
        if reverse in by_reward:
            dropped["contradicted_by_reward"] += 1
        elif reverse in by_vote:
            dropped["contradicted_by_votes"] += 1
        else:
            kept.append(choice)
    return kept


def _by_votes(visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]) -> Iterator[Choice]:
    """Each model in turn (or one) is the student, the others are its teachers."""
    classes: dict[str, str] = {visit.step["action"]: visit.form for visit in visits}
    for visit in visits:
        if student not in (None, visit.model):
            continue
        teachers = {other.name: other.step["action"] for other in visits if other.model != visit.model}
        if len(teachers) < LEAST_TEACHERS:
            dropped["too_few_teachers"] += 1
            continue
        ballot = Ballot({STUDENT: visit.step["action"], **teachers}, classes, num_teachers=len(teachers))
        preferences, reason = decide(ballot)
        dropped.update([reason] if reason else [])
        for preference in preferences:
            forms = (classes[preference.chosen], classes[preference.rejected])
            yield Choice(preference, forms, visit, "canonical", len(teachers))


def _by_rewards(visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]) -> Iterator[Choice]:
    """Of two actions that differ, the one whose rollouts ended better on average, over the other."""
    classes: dict[str, list[StateVisit]] = {}
    for visit in visits:
        if visit.reward is not None:
            classes.setdefault(visit.form, []).append(visit)
    if len(classes) < 2:
        dropped["actions_equal" if len({visit.form for visit in visits}) == 1 else "rewards_unknown"] += 1
        return
    uneven = [sorted(two, key=_mean) for two in combinations(classes.values(), 2) if _mean(two[0]) != _mean(two[1])]
    for worse, better in uneven:
        if student is None or any(visit.model == student for visit in (*worse, *better)):
            yield _better(better, worse, student, len(visits) - 1)
    dropped["rewards_equal"] += not uneven


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
