"""The distinct states of a run with the teachers' actions in them, and the vote in each.

A decision depends only on which actions of a state are equal. `patterns` groups the states of a block by that pattern
of equalities and decides each pattern once.

DuckDB numbers the states and joins steps and answers with them, once and one table after the other, since each may take
all of its memory. Sorted on disk, the states are then read one by one or in blocks of arrays.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from composer_stages.endings import NOT_WHOLE
from composer_stages.envs.base import Environment, Task
from composer_stages.errors import BadInput
from composer_stages.pairs.actions import (
    STUDENT,
    Ballot,
    Form,
    NotReproducible,
    Preference,
    StatePath,
    backers,
    class_names,
    decide,
    ends_in_failure,
    form,
    outcomes,
)
from composer_stages.pairs.blocks import (
    NOTHING,
    ActionClasses,
    Array,
    CanonicalForms,
    SortedRows,
    StateBlock,
    StateGroup,
    equal_rows,
    short_name,
    to_numpy,
)
from composer_stages.rollouts.distinct import DistinctStates
from composer_stages.runs.kinds import STEP, TEACHER_ACTION, Row
from composer_stages.runs.run import Run

STEPS = """
SELECT states.rowid AS n, nth, state_sha256, rollout_id, task_id, step, action, truncated, by_teacher,
prompt_delta_token_ids IS NOT NULL AS has_ids
FROM numbered JOIN states USING (state_sha256)
"""
WHOLE = f"CASE WHEN coalesce(finish_reason, '') NOT IN {NOT_WHOLE} THEN action END"
"""A teacher's answer, null where it is not whole, so no action."""
ANSWERS = f"""
SELECT states.rowid AS n, file_row_number AS nth, teacher, {WHOLE} AS whole,
coalesce(nullif(served_model, ''), model) AS served,
CASE WHEN error_type IS NULL THEN cost_usd ELSE coalesce(cost_usd, 0) END AS cost_usd
FROM answers JOIN states USING (state_sha256)
"""  # noqa: S608 (our own words)
"""A failed call without a bill costs 0."""
MEMORY_MB, MORE_MB = 150, 15
"""Memory of DuckDB to number and join: at least, and per million rows. Less was not enough."""
BLOCK_STATES = 8192
"""States whose arrays are in memory at a time."""
BATCH_STATES = 256
"""States whose rows are Python objects at a time."""
LOST = "state_not_reproducible"
UNJUDGED = {1: "student_truncated", 2: "teacher_turn"}
"""Why a step has no action of the student's that could be judged."""
MOST_NUMBERS = 4_000_000
"""Numbers in the largest array that compares the actions of alike states with each other."""
Positions = tuple[int, ...]
"""Positions among a state's actions: its steps, then the answers teacher by teacher."""


@dataclass(frozen=True)
class AnsweredState:
    """A distinct state with the teachers' actions in it, one per sample; None for a missing or truncated answer.

    steps: all recorded steps in the state, in the order of rollouts, with `rollout_id`, `task_id`, `action`,
    `truncated` (also of what a teacher played in it, `by_teacher`), and `has_ids`, whether their token ids are known. A
    teacher that was not asked in the state has no samples, but counts in majorities.
    """

    digest: str
    steps: list[Row]
    teachers: dict[str, list[str | None]] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        """Return the task of the rollout that reached the state first."""
        return str(self.steps[0]["task_id"])


class AnsweredStates(AbstractContextManager["AnsweredStates"]):
    """The distinct states of a run, in the order of rollouts and steps, read anew at each iteration.

    folder: for the data that exceeds memory. Raises `BadInput` when the answers belong to other rollouts.
    """

    def __init__(self, rollouts: Run, answers: Run, folder: Path) -> None:
        reference = answers.manifest.inputs["rollouts"][0]
        if reference.content != rollouts.manifest.content:
            path = Path(reference.path)
            # By its name in the folder of artifacts, where that was moved.
            path = path if path.is_dir() else Path(*path.parts[-2:])
            runs = [shlex.quote(str(run)) for run in (path, answers.path)]
            values = {"answers": answers.path, "answered": reference.path, "rollouts": rollouts.path, "runs": runs}
            raise BadInput("pairs.answers-of-other-rollouts", **values)
        steps, answer_table = rollouts.scan(STEP), answers.scan(TEACHER_ACTION)
        memory = max(MEMORY_MB, MORE_MB * (len(steps) + len(answer_table)) // 10**6)
        self._distinct, self._folder = DistinctStates(rollouts, folder, f"{memory}MB", answers=answer_table), folder
        self._database = self._distinct.database
        ordered = "SELECT teacher FROM answers GROUP BY teacher ORDER BY min(file_row_number)"
        self.teachers = [name for (name,) in self._database.execute(ordered).fetchall()]
        self._paths: dict[str, list[tuple[str, str]]] = {}

    def __exit__(self, *error: object) -> None:
        self._distinct.__exit__(*error)

    def __len__(self) -> int:
        return len(self._distinct)

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return the numbers of rollouts with steps, of steps, and of distinct states by task."""
        query = "SELECT count(DISTINCT rollout_id), count(*) FROM steps"
        ((rollouts, steps),) = self._database.execute(query).fetchall()
        # A state that the rollouts of two tasks share counts in each.
        query = "SELECT task_id, count(DISTINCT state_sha256) FROM steps GROUP BY task_id"
        return int(rollouts), int(steps), dict(self._database.execute(query).fetchall())

    @cached_property
    def _sorted(self) -> tuple[SortedRows, SortedRows]:
        """Steps and answers with the numbers of their states."""
        # One after the other: each join may take all of DuckDB's memory.
        steps, answers = (
            SortedRows(self._folder / name, self._database.sql(query).to_arrow_reader(BLOCK_STATES))
            for name, query in (("steps", STEPS), ("answers", ANSWERS))
        )
        return steps, answers

    def _parts(self, max_states: int) -> Iterator[tuple[int, int, pa.Table, pa.Table]]:
        """Yield the range of at most `max_states` states, their steps and their answers."""
        begins = range(0, number := len(self), max_states)
        ends = [min(begin + max_states, number) for begin in begins]
        yield from zip(begins, ends, *(rows.parts(ends) for rows in self._sorted), strict=True)

    def __iter__(self) -> Iterator[AnsweredState]:
        for _, _, steps, answer_table in self._parts(BATCH_STATES):
            answers = groupby(answer_table.to_pylist(), key=itemgetter("n"))
            number, answered = next(answers, (-1, iter(())))
            for n, rows in groupby(steps.to_pylist(), key=itemgetter("n")):
                recorded = list(rows)
                state = AnsweredState(recorded[0]["state_sha256"], recorded, {name: [] for name in self.teachers})
                if number == n:
                    for row in answered:
                        state.teachers[row["teacher"]].append(row["whole"])
                    number, answered = next(answers, (-1, iter(())))
                yield state

    def digests(self) -> Iterator[str]:
        """Yield the digests of all states, in order."""
        for row in self._distinct.rows("SELECT state_sha256 FROM states ORDER BY rowid"):
            yield row["state_sha256"]

    def blocks(self, max_states: int = BLOCK_STATES, form: Form = form) -> Iterator[StateBlock]:
        """Yield the states as arrays, at most `max_states` at a time. form: computes an action's canonical form."""
        forms = CanonicalForms(form)
        for begin, end, steps, answers in self._parts(max_states):
            yield StateBlock.from_tables(begin, end, self.teachers, steps, answers, forms)

    def path(self, state: AnsweredState) -> list[tuple[str, str]]:
        """Return (action, observation) of the steps before a state, in the first rollout that reached it."""
        first = state.steps[0]
        rollout_id = first["rollout_id"]
        if rollout_id not in self._paths:
            # States come in the order of rollouts, so a cache of a few rollouts is enough; observations may be long.
            self._paths = dict(list(self._paths.items())[-7:])
            query = "SELECT action, observation FROM steps WHERE rollout_id = ? ORDER BY step"
            with self._database.cursor() as cursor:
                self._paths[rollout_id] = cursor.execute(query, [rollout_id]).fetchall()
        return self._paths[rollout_id][: first["step"]]


def in_random_share(digest: str, share: float) -> bool:
    """Return whether a state is in a random share of all states, by its digest, so that all processes agree."""
    return int(digest[:12], 16) < share * 16**12


def unselected_states(answers: Run, block: StateBlock) -> Array:
    """Return which states [S] of a block have answers that were not requested because of other answers.

    Where all teachers were asked everywhere, those are all answered states; under a selection, the share that it
    explores at random: it asks where teachers are likely to disagree, so that its own choice would decide a test of
    agreement.
    """
    answered: Array = np.bincount(block.answer_state, minlength=block.size) > 0
    selection = answers.manifest.config.get("selection") or {"rule": "off"}
    if selection["rule"] == "off":
        return answered
    digests = block.first_step_column("state_sha256").to_pylist()
    return answered & np.array([in_random_share(digest, selection["explore"]) for digest in digests], dtype=bool)


def vote(
    state: AnsweredState,
    task: Task,
    make: Callable[[], Environment] | None,
    path: Sequence[tuple[str, str]] = (),
    form: Form = form,
) -> Row:
    """Return the classes of the actions in a state, the comparison used, and the chosen actions that fail.

    make: opens the environment in which actions whose forms differ are run, after the (action, observation) of `path`;
    None compares by form only. form: computes an action's canonical form. `students` and `teachers` are short names of
    classes, the same in every state; `failing` names the chosen actions that end the rollout and fail.
    """
    answers = chain.from_iterable(state.teachers.values())
    texts = dict.fromkeys(text for text in (*(step["action"] for step in state.steps), *answers) if text is not None)
    forms = {text: form(text) for text in texts}
    compared_by, by_outcome, reproducible, ending = "canonical", dict[str, str](), True, set[str]()
    state_path = StatePath(task, tuple(action for action, _ in path), tuple(observation for _, observation in path))
    candidates = {name: text for text, name in reversed(forms.items()) if name is not None}
    if make is not None and len(candidates) > 1:
        try:
            order = list(dict.fromkeys(name for name in forms.values() if name is not None))
            results = outcomes(make, state_path, [candidates[name] for name in order])
            compared_by, ending = "outcome", {outcome.digest for outcome in results if outcome.ends}
            by_outcome = {name: outcome.digest for name, outcome in zip(order, results, strict=True)}
        except NotReproducible:
            # Comparing by form instead would be wrong: different forms may be equal, and the environment has changed.
            reproducible = False
    classes = {text: None if name is None else by_outcome.get(name, name) for text, name in forms.items()}
    names = class_names(classes, forms)
    short = {text: None if name is None else short_name(name) for text, name in names.items()}
    chosen = dict[str | None, str]()
    for step in state.steps if reproducible else ():
        if not step["truncated"]:
            preferences, _ = decide(Ballot(step["action"], state.teachers, classes))
            chosen |= {classes[preference.chosen]: preference.chosen for preference in preferences}
    # Only actions that a pair would choose are graded: a grade may take minutes of tests.
    failing = {
        short[text]
        for name, text in chosen.items()
        if make is not None and name in ending and ends_in_failure(make, state_path, text)
    }
    return {
        "reproducible": reproducible,
        "compared_by": compared_by,
        "students": [None if step["truncated"] else short[step["action"]] for step in state.steps],
        "teachers": {name: [text and short[text] for text in texts] for name, texts in state.teachers.items()},
        "failing": sorted(filter(None, failing)),
    }


def recorded_classes(block: StateBlock, records: Iterable[Row]) -> ActionClasses:
    """Return the classes of a block as `vote` recorded them in each state."""
    number_of: dict[str, int] = {}
    steps, answers, compared_by, lost = list[int](), list[int](), list[str](), list[bool]()
    failing: tuple[list[bool], list[bool]] = [], []  # of steps, of answers
    for record in records:
        compared_by.append(record["compared_by"])
        lost.append(not record["reproducible"])
        for numbers, flags, names in (
            (steps, failing[0], record["students"]),
            (answers, failing[1], list(chain(*(record["teachers"][name] for name in block.teachers)))),
        ):
            numbers += [NOTHING if name is None else number_of.setdefault(name, len(number_of)) for name in names]
            flags += [name in record["failing"] for name in names]
    class_of = np.array(steps + answers, dtype=np.int64)
    fails = np.array(failing[0] + failing[1], dtype=bool)
    return ActionClasses(class_of, list(number_of), pa.array(compared_by), np.array(lost), fails)


# The vote in thousands of states at a time


@dataclass(frozen=True)
class JudgedState:
    """The classes of the actions in one state: the student's by recorded step, each teacher's by sample.

    None stands for a missing or malformed action.
    """

    students: Sequence[str | None]
    teachers: Mapping[str, Sequence[str | None]]

    def preferences(self, without: str | None = None) -> Iterator[tuple[Preference, int]]:
        """Yield the preferences among classes, each with the step that it judges. without: a teacher to leave out."""
        teachers = {name: actions for name, actions in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for step, action in enumerate(self.students):
            for preference in decide(Ballot(action or "", teachers, {"": None, **classes}))[0]:
                yield preference, step

    def most_common(self, teacher: str) -> str | None:
        """Return the most common action of a teacher; None without an action."""
        counts = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True)
class LeaveOneOut:
    """The influence of a teacher in a state: pairs lost and won without it, and pairs that it backs.

    sides: for each recorded step, "joined" where the student took the teacher's action against the majority, "opposed"
    where the student took the majority's, else None. It is None if the teacher agrees with the majority.
    """

    lost: int
    won: int
    backed: int
    sides: tuple[str | None, ...] | None


def leave_one_out(state: JudgedState, teacher: str) -> LeaveOneOut:
    """Compute the influence of a teacher on the pairs of one state."""
    preferences = [preference for preference, _ in state.preferences()]
    all_pairs = {(pair.rule, pair.chosen, pair.rejected) for pair in preferences}
    without = {(pair.rule, pair.chosen, pair.rejected) for pair, _ in state.preferences(without=teacher)}
    answer = state.most_common(teacher)
    # a teacher backs a pair with the action chosen over the student, or with the one rejected in the student's favour
    backed = sum(answer == (pair.chosen if pair.rejected_by == STUDENT else pair.rejected) for pair in preferences)
    winner = preferences[-1].chosen if preferences else None  # by either rule the chosen action is the majority's
    sides = None
    if winner is not None and answer is not None and answer != winner:
        names = {answer: "joined", winner: "opposed"}
        sides = tuple(None if action is None else names.get(action) for action in state.students)
    return LeaveOneOut(len(all_pairs - without), len(without - all_pairs), backed, sides)


@dataclass(frozen=True)
class PatternPair:
    """A pair: the step that it judges, and the first positions of its sides in the pattern."""

    step: int
    chosen: int
    rejected: int
    preference: Preference
    chosen_by: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """The decision in a state. reasons: of the steps without a pair; shared: the number of pairs that share its cost.

    teachers: the influence of each; preferences: all preferences among classes, each with the step that it judges;
    answers: the positions of the student's first action and of each teacher's most common one, `NOTHING` for none.
    """

    reasons: tuple[str, ...]
    pairs: tuple[PatternPair, ...]
    duplicates: int
    shared: int
    teachers: tuple[LeaveOneOut, ...]
    preferences: tuple[tuple[Preference, int], ...]
    answers: Positions


def patterns(block: StateBlock, classes: ActionClasses) -> Iterator[tuple[StateGroup, Pattern]]:
    """Yield the states of a block grouped by pattern."""
    truncated = np.zeros(len(block.actions), dtype=np.int8)  # 2: no action of the student's at all
    for name in ("truncated", "by_teacher"):
        truncated[: len(block.steps)] += to_numpy(block.steps[name], null=False)
    class_of = np.where(truncated > 0, NOTHING, classes.class_of)
    for group in block.groups(MOST_NUMBERS):
        length, students = group.rows.shape[1], group.students
        cut, lost = truncated[group.rows[:, :students]], classes.lost[group.states, None]
        equalities = np.hstack([_first_equal(block.text_of[group.rows]), _first_equal(class_of[group.rows]), cut, lost])
        for members in equal_rows(np.ascontiguousarray(equalities, dtype=np.int32)):
            row, shape = equalities[members[0]].tolist(), (students, group.samples)
            texts, kinds, flags = row[:length], row[length : 2 * length], row[2 * length :]
            pattern = _pattern(block.teachers, shape, tuple(texts), tuple(kinds), tuple(flags[:-1]), bool(flags[-1]))
            yield StateGroup(group.states[members], group.rows[members], *shape), pattern


def _first_equal(values: Array) -> Array:
    """Return the position [S, L] of the first equal value in each row [S, L]; `NOTHING` for `NOTHING`."""
    # States on the last axis: NumPy then compares and reduces thousands of them at a time.
    columns = np.ascontiguousarray(values.T)
    positions = np.arange(len(columns), dtype=np.int32)[:, None, None]
    first = np.where(columns[:, None] == columns[None], positions, len(columns)).min(axis=0)
    return np.where(columns == NOTHING, NOTHING, first).T


@lru_cache(16_384)
def vote_on_texts(
    student: str, teachers: tuple[tuple[str, tuple[str | None, ...]], ...], kinds: tuple[str | None, ...]
) -> tuple[tuple[tuple[Preference, tuple[str, ...]], ...], str | None]:
    """Vote on numbered texts, which most states have in common. kinds: their classes, in order."""
    texts = dict.fromkeys(text for text in (student, *chain(*(samples for _, samples in teachers))) if text is not None)
    ballot = Ballot(student, dict(teachers), dict(zip(texts, kinds, strict=True)))
    preferences, reason = decide(ballot)
    return tuple((preference, tuple(backers(ballot, preference))) for preference in preferences), reason


@lru_cache(16_384)
def _pattern(
    teachers: tuple[str, ...],
    shape: tuple[int, tuple[int, ...]],
    texts: Positions,
    classes: Positions,
    truncated: Positions,
    lost: bool,
) -> Pattern:
    """Decide a pattern: its numbers of steps and samples (`shape`), and its equal actions (`texts`, `classes`)."""
    students, samples = shape
    ends = (students + np.cumsum(samples, dtype=int)).tolist()
    spans = {name: range(end - number, end) for name, number, end in zip(teachers, samples, ends, strict=True)}
    class_names = [None if number == NOTHING else str(number) for number in classes]
    reasons, votes = list[str](), list[PatternPair]()
    for step in range(students):
        reason, step_pairs = _step_pairs(step, spans, texts, class_names, truncated[step], lost)
        reasons += [] if reason is None else [reason]
        votes += step_pairs
    sides = [(vote.chosen, vote.rejected) for vote in votes]
    # Steps with equal actions give equal pairs: reversed, so that the first vote stays.
    first_votes = dict(zip(reversed(sides), reversed(votes), strict=True))
    actions = {name: class_names[span.start : span.stop] for name, span in spans.items()}
    judged = JudgedState(class_names[:students], actions)
    answers = [judged.students[0], *(judged.most_common(name) for name in teachers)]
    return Pattern(
        tuple(reasons),
        tuple(vote for side, vote in zip(sides, votes, strict=True) if first_votes[side] is vote),
        len(votes) - len(first_votes),
        len(first_votes),
        tuple(leave_one_out(judged, name) for name in teachers),
        tuple(judged.preferences()),
        tuple(NOTHING if action is None else int(action) for action in answers),
    )


def _step_pairs(
    step: int, spans: dict[str, range], texts: Positions, class_names: Sequence[str | None], truncated: int, lost: bool
) -> tuple[str | None, list[PatternPair]]:
    """Return the pairs of one recorded step, or the reason for none."""
    if lost:
        return LOST, []
    if truncated:
        return UNJUDGED[truncated], []
    if not any(spans.values()):
        return "not_asked", []
    positions = [step, *chain(*spans.values())]
    class_of = {texts[i]: class_names[i] for i in reversed(positions)}
    order = dict.fromkeys(texts[i] for i in positions if texts[i] != NOTHING)
    teachers = tuple(
        (name, tuple(None if texts[i] == NOTHING else str(texts[i]) for i in span)) for name, span in spans.items()
    )
    preferences, reason = vote_on_texts(str(texts[step]), teachers, tuple(class_of[text] for text in order))
    return reason, [PatternPair(step, int(p.chosen), int(p.rejected), p, names) for p, names in preferences]
