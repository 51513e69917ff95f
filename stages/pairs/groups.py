"""Pairs from groups of rollouts on one task: shared states, and the preferences by votes and by rewards.

Two rollouts are in the same state when they have the same opening messages, the same actions (by canonical form) and
the same observations. Their reasoning may differ; the context of a pair is that of the rejected side, or of the student
where one is named. Submissions are compared by their verdicts, an accepted patch over a refused one; their context is
the task alone, as the path to the answer differs between rollouts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby, product
from operator import itemgetter
from pathlib import Path

from composer_stages.envs.base import Task
from composer_stages.pairs.actions import (
    STUDENT,
    Ballot,
    Preference,
    canonical,
    canonical_answer,
    canonical_command,
    decide,
)
from composer_stages.rollouts.trace import (
    STATE_COLUMNS,
    by_rollout,
    opening_row,
    state_id,
    state_rows,
    state_sha256,
    states,
    step_groups,
    tools_by_rollout,
)
from composer_stages.runs import store
from composer_stages.runs.kinds import PAIR, STEP, Row
from composer_stages.runs.run import Run
from composer_stages.runs.tables import open_database, rows_of

MIN_ROLLOUTS = 2
"""On each side: the reward of a single rollout depends as much on its other steps as on this one."""
LEVEL = 0.05
"""Of the test of a difference of mean rewards, shared among the pairs of a state."""
LEAST_VISITS = 7
"""Rollouts through a state that can show a difference: 3 of one action against 4 of another, all of which ended
otherwise, have p = 1/35; no division of 6 has one below `LEVEL`."""
MIN_TEACHERS = 2
"""A majority of one other model would be its opinion alone, and each of two models would outvote the other."""
TASK_STEP = "task"
"""Replaces the step in the name of a state before the first action."""
COMPARED_COLUMNS = (
    *("rollout_id", "task_id", "step", "new_messages_json", "history", "state_sha256"),
    *("action", "commands", "truncated"),
)
"""The columns of steps by which rollouts of one task are compared."""


@dataclass(frozen=True)
class StateVisit:
    """One rollout in a state: its step, its model and its final reward."""

    step: Row
    model: str
    reward: float | None
    form: str


@dataclass(frozen=True)
class Choice:
    """A preference in a state: the forms of its sides, the visit that gives its context, and the comparison."""

    preference: Preference
    forms: tuple[str, str]
    visit: StateVisit
    compared_by: str
    num_others: int


@dataclass(frozen=True)
class SubmissionPair:
    """A preference between two submissions, the rollout of the rejected one, and the number of other submissions."""

    preference: Preference
    rollout: Row
    num_others: int


def steps_by_task(run: Run, folder: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield each task with its steps in recorded order, with the columns `COMPARED_COLUMNS`."""
    table = run.scan(STEP)
    columns = ", ".join(name for name in COMPARED_COLUMNS if name in table.columns)
    with open_database(folder, steps=table) as database:
        ordered = rows_of(database, f"SELECT {columns} FROM steps ORDER BY task_id, file_row_number")  # noqa: S608
        for task, rows in groupby(ordered, key=itemgetter("task_id")):
            yield task, list(rows)


def group_pairs(
    task: Task, rollouts: Sequence[Row], steps: Sequence[Row], submitted: Mapping[str, str | None], student: str | None
) -> Row:
    """Return the distinct pairs of one task, the number dropped by reason, and the number of shared states.

    `voted`: the rollouts with a vote against their action, in line with a failure, and those with a vote for it.
    """
    dropped: Counter[str] = Counter()
    candidates: list[Row] = []
    voted: tuple[list[str], list[str]] = [], []
    shared_states = visits_by_state(steps, rollouts)
    for visits in shared_states:
        choices, votes, reasons = choose(visits, student)
        dropped += reasons
        for vote in votes:
            voted[vote.preference.rejected_by != STUDENT].append(vote.visit.step["rollout_id"])
        candidates += [
            pair_row(
                choice.preference,
                task,
                choice.visit.step,
                state=state_id(choice.visit.step),
                num_teachers=choice.num_others,
                compared_by=choice.compared_by,
            )
            for choice in choices
        ]
    submissions, reasons = compare_submissions(rollouts, submitted, student)
    dropped += reasons
    dropped["task_without_words"] += 0 if task.prompt else len(submissions)
    for submission in submissions if task.prompt else ():
        state = task_state(task)
        start = {"rollout_id": submission.rollout["rollout_id"], "step": 0, "state_sha256": state["state_sha256"]}
        candidates.append(
            pair_row(
                submission.preference,
                task,
                start,
                state=state["state_id"],
                num_teachers=submission.num_others,
                compared_by="reward",
            )
        )
    pairs: dict[str, Row] = {}
    for row in candidates:
        dropped["duplicate"] += row["pair_id"] in pairs
        pairs.setdefault(row["pair_id"], row)
    shared = sum(len(visits) > 1 for visits in shared_states)
    counts = {"dropped": dict(+dropped), "states": len(shared_states), "shared": shared}
    return {"pairs": list(pairs.values()), "voted": voted, **counts}


def visits_by_state(steps: Sequence[Row], rollouts: Sequence[Row]) -> list[list[StateVisit]]:
    """Return the visits to each state of a group's rollouts, in recorded order."""
    rollout_by_id = {row["rollout_id"]: row for row in rollouts}
    visits: dict[str, list[StateVisit]] = {}
    for rollout_id, rows in by_rollout(list(steps)).items():
        rollout = rollout_by_id[rollout_id]
        key, num_digested = store.digest(rollout["group_id"]), 0  # the key digests everything that led to the state
        for row, messages in zip(rows, states(rows), strict=True):
            key = store.digest([key, messages[num_digested:]])
            # The form of an action: its calls or command, else the commands that its source reports, else its text.
            action = canonical(row["action"])
            if action is None and row["commands"]:
                action = "ran: " + "\n".join(map(canonical_command, row["commands"]))
            if action is None:
                action = canonical_answer(row["action"])
            visit = StateVisit(row, rollout["model"] or "unknown", rollout["reward"], action)
            visits.setdefault(key, []).append(visit)
            # By the form and not by the text: rollouts whose reasoning differs stay in the same state.
            key, num_digested = store.digest([key, action]), len(messages) + 1
    return list(visits.values())


def choose(visits: Sequence[StateVisit], student: str | None) -> tuple[list[Choice], list[Choice], Counter[str]]:
    """Return the preferences in one state by votes and by rewards, all votes, and the number dropped by reason.

    Votes that rewards or other votes contradict are dropped: no action is on both sides in one state. The returned
    votes include these: votes that rewards have selected cannot be compared with rewards.
    """
    dropped: Counter[str] = Counter()
    complete = [visit for visit in visits if not visit.step["truncated"]]
    dropped["truncated"] = len(visits) - len(complete)
    if len(complete) < 2:
        dropped["state_not_shared"] = len(complete)
        return [], [], +dropped
    better = list(_preferences_by_rewards(complete, student, dropped))
    voted = votes = list(_preferences_by_votes(complete, student, dropped))
    for reason in ("contradicted_by_reward", "contradicted_by_votes"):
        contradicting = better if reason == "contradicted_by_reward" else voted
        won, lost = ({choice.forms[side] for choice in contradicting} for side in (0, 1))
        consistent = [choice for choice in voted if choice.forms[0] not in lost and choice.forms[1] not in won]
        dropped[reason] += len(voted) - len(consistent)
        voted = consistent
    # An action without text cannot be trained on: its completion would be an end token alone.
    nonempty = [c for c in (*voted, *better) if c.preference.chosen.strip() and c.preference.rejected.strip()]
    dropped["empty_action"] = len(voted) + len(better) - len(nonempty)
    return nonempty, votes, +dropped


def _preferences_by_votes(visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]) -> Iterator[Choice]:
    """Yield preferences by votes: each model in turn, or only `student`, with the remaining models as teachers."""
    classes: dict[str, str] = {visit.step["action"]: visit.form for visit in visits}
    for visit in visits:
        if student not in (None, visit.model):
            continue
        # Other rollouts of the student's model are no teachers: a model does not outvote itself.
        teachers: dict[str, list[str | None]] = {}
        for teacher_visit in visits:
            if teacher_visit.model != visit.model:
                teachers.setdefault(teacher_visit.model, []).append(teacher_visit.step["action"])
        if len(teachers) < MIN_TEACHERS:
            dropped["too_few_teachers"] += 1
            continue
        preferences, reason = decide(Ballot(visit.step["action"], teachers, classes))
        dropped.update([reason] if reason else [])
        for preference in preferences:
            forms = (classes[preference.chosen], classes[preference.rejected])
            yield Choice(preference, forms, visit, "canonical", len(teachers))


def _preferences_by_rewards(
    visits: Sequence[StateVisit], student: str | None, dropped: Counter[str]
) -> Iterator[Choice]:
    """Yield the action with the better rewards over another action, where a test supports the difference.

    Where the better action of one pair is the worse of another, both are dropped (`both_sides_of_a_state`).
    """
    classes: dict[str, list[StateVisit]] = {}
    for visit in visits:
        if visit.reward is not None:
            classes.setdefault(visit.form, []).append(visit)
    if len(classes) < 2:
        dropped["actions_equal" if len({visit.form for visit in visits}) == 1 else "rewards_unknown"] += 1
        return

    means = {form: sum(visit.reward or 0.0 for visit in side) / len(side) for form, side in classes.items()}
    ordered = [sorted(forms, key=means.__getitem__) for forms in combinations(classes, 2)]
    uneven = [(classes[worse], classes[better]) for worse, better in ordered if means[worse] != means[better]]
    dropped["rewards_equal"] += not uneven
    eligible = [sides for sides in uneven if student in (None, *(visit.model for side in sides for visit in side))]
    # The level is shared among the pairs that are tested (Bonferroni), as each state may give several.
    testable = [sides for sides in eligible if min(map(len, sides)) >= MIN_ROLLOUTS]
    dropped["too_few_rollouts"] += len(eligible) - len(testable)
    supported = [sides for sides in testable if _means_differ(*sides, level=LEVEL / len(testable))]
    dropped["difference_not_supported"] += len(testable) - len(supported)
    chosen_forms, rejected_forms = ({sides[side][0].form for sides in supported} for side in (1, 0))
    for worse, better in supported:
        if worse[0].form in chosen_forms or better[0].form in rejected_forms:
            dropped["both_sides_of_a_state"] += 1
            continue
        # the best of one side over the worst of the other, the student's own action where it is on a side
        chosen = max(better, key=lambda visit: (visit.model == student, visit.reward))
        rejected = min(worse, key=lambda visit: (visit.model != student, visit.reward))
        context = chosen if chosen.model == student else rejected
        texts = (chosen.step["action"], rejected.step["action"])
        preference = Preference("better_outcome", *texts, rejected.model, len(better), len(worse))
        yield Choice(preference, (chosen.form, rejected.form), context, "reward", len(visits) - 1)


def _means_differ(worse: Sequence[StateVisit], better: Sequence[StateVisit], *, level: float) -> bool:
    """Return whether the difference of two means is above zero, by rearranging the rewards among the rollouts.

    The exact test of Fisher and Pitman: valid for rewards of any distribution, without power for few rollouts (3
    against 3 never come below 0.05).
    """
    from scipy.stats import fisher_exact, permutation_test

    sides = [[visit.reward or 0.0 for visit in side] for side in (better, worse)]
    if len({*sides[0], *sides[1]}) == 2:  # two values, as verdicts have: Fisher's exact test gives the same p-value
        high = max(max(side) for side in sides)
        counts = [[side.count(high), len(side) - side.count(high)] for side in sides]
        return float(fisher_exact(counts).pvalue) <= level
    test = permutation_test(
        sides,
        lambda first, second, axis=-1: first.mean(axis=axis) - second.mean(axis=axis),
        vectorized=True,
        n_resamples=20_000,
        rng=0,
    )
    return bool(test.pvalue <= level)


def compare_submissions(
    rollouts: Sequence[Row], submitted: Mapping[str, str | None], student: str | None
) -> tuple[list[SubmissionPair], Counter[str]]:
    """Return preferences between the submissions for one task, and the number dropped by reason.

    Every distinct text counts once, whatever blanks surround it; a text with different rewards is not compared.
    """
    dropped: Counter[str] = Counter()
    judged: dict[str, list[Row]] = {}
    texts: dict[str, str] = {}
    for row in rollouts:
        text = submitted.get(row["rollout_id"]) or ""
        text = texts.setdefault(text.strip(), text)
        if not text.strip():
            dropped["no_submission"] += row["hidden_pass"] is not None
        elif row["reward"] is None:
            dropped["submission_not_judged"] += 1
        else:
            judged.setdefault(text, []).append(row)
    settled = {text: rows for text, rows in judged.items() if len({row["reward"] for row in rows}) == 1}
    dropped["submission_judged_both_ways"] = len(judged) - len(settled)
    pairs = []
    for (better, winners), (worse, losers) in product(settled.items(), repeat=2):
        of_student = student is None or any(row["model"] == student for row in (*winners, *losers))
        if winners[0]["reward"] > losers[0]["reward"] and of_student:
            model = losers[0]["model"] or "unknown"
            preference = Preference("better_submission", better, worse, model, len(winners), len(losers))
            pairs.append(SubmissionPair(preference, losers[0], len(settled) - 1))
    dropped["submissions_equal"] = bool(settled) and not pairs
    return pairs, +dropped


def pair_id(state_sha256: str, chosen: str, rejected: str) -> str:
    """Return the id of a pair: equal for equal preferences in one state."""
    return store.digest([state_sha256, chosen, rejected])[:24]


def pair_row(preference: Preference, task: Task, step: Row, *, state: str, num_teachers: int, compared_by: str) -> Row:
    """Build a `pair/1` row of imported groups.

    `step` has the rollout, the step and the digest of the state, `state` is the id of its row in `states`.
    """
    return {
        **dict.fromkeys(PAIR.columns),
        "rule": preference.rule,
        "chosen": preference.chosen,
        "rejected": preference.rejected,
        "rejected_by": preference.rejected_by,
        "votes_chosen": preference.votes_chosen,
        "votes_rejected": preference.votes_rejected,
        "task_id": task.task_id,
        "family": task.family,
        **{name: step[name] for name in ("rollout_id", "step", "state_sha256")},
        "pair_id": pair_id(step["state_sha256"], preference.chosen, preference.rejected),
        "state_id": state,
        "num_teachers": num_teachers,
        "compared_by": compared_by,
    }


def task_state(task: Task) -> Row:
    """Return the `state/2` row of a task's prompt, before the first action."""
    messages = [{"role": "user", "content": task.prompt}]
    return opening_row(f"{task.task_id}/{TASK_STEP}", messages, state_sha256(messages))


@dataclass(eq=False)
class NamedStates:
    """The states that pairs refer to: by rollout the last step, and the tasks whose prompt is a state."""

    _last: dict[str, int] = field(default_factory=dict, init=False)
    _tasks: set[str] = field(default_factory=set, init=False)

    def add(self, name: str) -> None:
        """Add one `state_id`."""
        owner, _, step = name.rpartition("/")
        if step == TASK_STEP:
            self._tasks.add(owner)
        else:
            self._last[owner] = max(self._last.get(owner, 0), int(step))

    def rows(self, rollouts: Run, tasks: Iterable[Task] = ()) -> Iterator[Row]:
        """Yield their `state/2` rows, and those of the steps before them; the steps of a run are read once."""
        tools = tools_by_rollout(rollouts)
        for steps in step_groups(rollouts.scan(STEP).rows(STATE_COLUMNS)):
            if (owner := steps[0]["rollout_id"]) in self._last:
                yield from state_rows(steps, self._last[owner], tools.get(owner))
        yield from (task_state(task) for task in tasks if task.task_id in self._tasks)
