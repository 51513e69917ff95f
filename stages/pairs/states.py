"""The distinct states of a run with the teachers' actions in them, and the vote in each.

What is decided in a state depends only on which of its actions are equal. `patterns` groups the states of a block by
that pattern of equalities and decides each pattern once.

DuckDB numbers the states and joins steps and answers with them, once and one table after the other, since each may take
all of its memory; sorted on disk, the states then come one by one, or in blocks of arrays, however often they are read.
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

from stages.envs.base import Environment, Task
from stages.errors import BadInput
from stages.pairs.actions import (
    STUDENT,
    Ballot,
    Form,
    NotReproducible,
    Preference,
    StatePath,
    backers,
    class_names,
    decide,
    fails_at_once,
    form,
    outcomes,
)
from stages.pairs.blocks import (
    NOTHING,
    ActionClasses,
    AlikeStates,
    Array,
    CanonicalForms,
    SortedRows,
    StateBlock,
    equal_rows,
    short_name,
    to_numpy,
)
from stages.rollouts.distinct import DistinctStates
from stages.runs.kinds import STEP, TEACHER_ACTION, Row
from stages.runs.run import Run

STEPS = """
SELECT states.rowid AS n, nth, state_sha256, rollout_id, task_id, step, action, truncated,
prompt_delta_token_ids IS NOT NULL AS has_ids
FROM numbered JOIN states USING (state_sha256)
"""
ANSWERS = """
SELECT states.rowid AS n, file_row_number AS nth, teacher,
CASE WHEN finish_reason IS DISTINCT FROM 'length' THEN action END AS whole,
coalesce(nullif(served_model, ''), model) AS served,
CASE WHEN error_type IS NULL THEN cost_usd ELSE coalesce(cost_usd, 0) END AS cost_usd
FROM answers JOIN states USING (state_sha256)
"""
"""A call that failed without a bill cost nothing."""
MEMORY_MB, MORE_MB = 150, 15
"""Memory of DuckDB to number and join, and per million rows where that is more: less was not enough."""
BLOCK_STATES = 8192
"""States whose arrays are in memory together."""
BATCH_STATES = 256
"""States whose rows are Python objects together."""
LOST = "state_not_reproducible"
MOST_NUMBERS = 4_000_000
"""Numbers in the largest array that compares the actions of alike states with each other."""
Places = tuple[int, ...]
"""Places of a state's actions among each other: its steps, then the answers teacher by teacher."""


@dataclass(frozen=True)
class AnsweredState:
    """A distinct state with the teachers' actions in it, one per sample; None for no answer, or one that was cut off.

    steps: all that were recorded in it, in the order of rollouts, with their rollout, task, action, whether that was
    cut off, and `has_ids`, whether their token ids are known; the first is of the rollout that reached the state
    first. A teacher that was not asked there has no samples; it counts when majorities are taken.
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

    `folder` is for what exceeds memory. Raises `BadInput` when the answers belong to other rollouts.
    """

    def __init__(self, rollouts: Run, answers: Run, folder: Path) -> None:
        asked = answers.manifest.inputs["rollouts"][0]
        if asked.content != rollouts.manifest.content:
            # By its name in the folder of artifacts, where that was moved.
            of = Path(asked.path) if Path(asked.path).is_dir() else Path(*Path(asked.path).parts[-2:])
            together = " ".join(f"--from {shlex.quote(str(path))}" for path in (of, answers.path))
            raise BadInput(
                f"{answers.path} answers the rollouts of {asked.path}, not those of {rollouts.path}. "
                f"Give both: {together}. Or rerun replay-teachers on these rollouts."
            )
        steps, given = rollouts.scan(STEP), answers.scan(TEACHER_ACTION)
        memory = max(MEMORY_MB, MORE_MB * (len(steps) + len(given)) // 10**6)
        self._distinct, self._folder = DistinctStates(rollouts, folder, f"{memory}MB", answers=given), folder
        self._database = self._distinct.database
        ordered = "SELECT teacher FROM answers GROUP BY teacher ORDER BY min(file_row_number)"
        self.teachers = [name for (name,) in self._database.execute(ordered).fetchall()]
        self._paths: dict[str, list[tuple[str, str]]] = {}

    def __exit__(self, *error: object) -> None:
        self._distinct.__exit__(*error)

    def __len__(self) -> int:
        return len(self._distinct)

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return the number of rollouts that have steps, of their steps, and of distinct states by task."""
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

    def _parts(self, most: int) -> Iterator[tuple[int, int, pa.Table, pa.Table]]:
        """Yield steps and answers of at most `most` states at a time, with the first of the states and their end."""
        begins = range(0, number := len(self), most)
        ends = [min(begin + most, number) for begin in begins]
        yield from zip(begins, ends, *(rows.parts(ends) for rows in self._sorted), strict=True)

    def __iter__(self) -> Iterator[AnsweredState]:
        for _, _, steps, given in self._parts(BATCH_STATES):
            answers = groupby(given.to_pylist(), key=itemgetter("n"))
            at, answered = next(answers, (-1, iter(())))
            for n, rows in groupby(steps.to_pylist(), key=itemgetter("n")):
                recorded = list(rows)
                state = AnsweredState(recorded[0]["state_sha256"], recorded, {name: [] for name in self.teachers})
                if at == n:
                    for row in answered:
                        state.teachers[row["teacher"]].append(row["whole"])
                    at, answered = next(answers, (-1, iter(())))
                yield state

    def digests(self) -> Iterator[str]:
        """Yield the digests of all states, in order."""
        for row in self._distinct.rows("SELECT state_sha256 FROM states ORDER BY rowid"):
            yield row["state_sha256"]

    def blocks(self, most: int = BLOCK_STATES, form: Form = form) -> Iterator[StateBlock]:
        """Yield the same states as arrays, at most `most` at a time; `form`: of actions, to compare texts by."""
        forms = CanonicalForms(form)
        for begin, end, steps, answers in self._parts(most):
            yield StateBlock.from_tables(begin, end, self.teachers, steps, answers, forms)

    def path(self, state: AnsweredState) -> list[tuple[str, str]]:
        """Return (action, observation) of the steps before a state, in the rollout that reached the state first."""
        first = state.steps[0]
        rollout_id = first["rollout_id"]
        if rollout_id not in self._paths:
            # States come in the order of rollouts, so a few rollouts are enough; observations may be long.
            self._paths = dict(list(self._paths.items())[-7:])
            query = "SELECT action, observation FROM steps WHERE rollout_id = ? ORDER BY step"
            with self._database.cursor() as cursor:
                self._paths[rollout_id] = cursor.execute(query, [rollout_id]).fetchall()
        return self._paths[rollout_id][: first["step"]]


def explored(digest: str, share: float) -> bool:
    """Return whether a state is in a random share of all: by its digest, so that every process agrees on it."""
    return int(digest[:12], 16) < share * 16**12


def asked_blindly(answers: Run, block: StateBlock) -> Array:
    """Return which states [S] of a block have answers that were not requested because of other answers.

    Where all teachers were asked everywhere, those are all answered states; under a selection, the share that it
    explores at random: it asks where teachers are likely to disagree, so that its own choice would decide a test of
    agreement.
    """
    asked: Array = np.bincount(block.answered, minlength=block.size) > 0
    selection = answers.manifest.config.get("selection") or {"rule": "off"}
    if selection["rule"] == "off":
        return asked
    digests = block.first_step_column("state_sha256").to_pylist()
    return asked & np.array([explored(digest, selection["explore"]) for digest in digests], dtype=bool)


def vote(
    state: AnsweredState,
    task: Task,
    make: Callable[[], Environment] | None,
    path: Sequence[tuple[str, str]] = (),
    form: Form = form,
) -> Row:
    """Return the classes of the actions in a state, how they were compared, and which chosen actions fail there.

    make: the environment in which actions whose forms differ are run, after the (action, observation) of `path`; None
    compares texts alone. form: of an action. `students` and `teachers` are short names of classes that mean the same in
    every state; `failing` are those of chosen actions that end the rollout there and fail.
    """
    answers = chain.from_iterable(state.teachers.values())
    texts = dict.fromkeys(text for text in (*(step["action"] for step in state.steps), *answers) if text is not None)
    forms = {text: form(text) for text in texts}
    compared_by, by_outcome, reproducible, ending = "canonical", dict[str, str](), True, set[str]()
    reached = StatePath(task, tuple(action for action, _ in path), tuple(seen for _, seen in path))
    candidates = {name: text for text, name in reversed(forms.items()) if name is not None}
    if make is not None and len(candidates) > 1:
        try:
            order = list(dict.fromkeys(name for name in forms.values() if name is not None))
            results = outcomes(make, reached, [candidates[name] for name in order])
            compared_by, ending = "outcome", {one.digest for one in results if one.ends}
            by_outcome = {name: one.digest for name, one in zip(order, results, strict=True)}
        except NotReproducible:
            # Not compared by form instead: what differs in form may be equal here, and the environment has changed.
            reproducible = False
    classes = {text: None if name is None else by_outcome.get(name, name) for text, name in forms.items()}
    names = class_names(classes, forms)
    short = {text: None if name is None else short_name(name) for text, name in names.items()}
    steps = [step for step in state.steps if reproducible and not step["truncated"]]
    found = (one for step in steps for one in decide(Ballot(step["action"], state.teachers, classes))[0])
    # Graded where a pair would choose the action, and nowhere else: a grade may take minutes of tests.
    chosen = {classes[one.chosen]: one.chosen for one in found}
    failing = (
        {short[text] for name, text in chosen.items() if name in ending and fails_at_once(make, reached, text)}
        if make is not None
        else set[str]()
    )
    return {
        "reproducible": reproducible,
        "compared_by": compared_by,
        "students": [None if step["truncated"] else short[step["action"]] for step in state.steps],
        "teachers": {name: [text and short[text] for text in texts] for name, texts in state.teachers.items()},
        "failing": sorted(filter(None, failing)),
    }


def recorded_classes(block: StateBlock, records: Iterable[Row]) -> ActionClasses:
    """Return the classes of a block as `vote` found them in each of its states."""
    known: dict[str, int] = {}
    steps, answers, compared_by, lost = list[int](), list[int](), list[str](), list[bool]()
    failing: tuple[list[bool], list[bool]] = [], []  # of steps, of answers
    for record in records:
        compared_by.append(record["compared_by"])
        lost.append(not record["reproducible"])
        for numbers, flags, names in (
            (steps, failing[0], record["students"]),
            (answers, failing[1], list(chain(*(record["teachers"][name] for name in block.teachers)))),
        ):
            numbers += [NOTHING if name is None else known.setdefault(name, len(known)) for name in names]
            flags += [name in record["failing"] for name in names]
    class_of = np.array(steps + answers, dtype=np.int64)
    fails = np.array(failing[0] + failing[1], dtype=bool)
    return ActionClasses(class_of, list(known), pa.array(compared_by), np.array(lost), fails)


# The vote in thousands of states at a time


@dataclass(frozen=True)
class JudgedState:
    """The actions in one state: of the student in each recorded step, of each teacher in each sample.

    Actions are names of classes, None for a missing or malformed one.
    """

    students: Sequence[str | None]
    teachers: Mapping[str, Sequence[str | None]]

    def preferences(self, without: str | None = None) -> Iterator[tuple[Preference, int]]:
        """Yield the preferences among classes, perhaps without one teacher, each with the step that it judges."""
        teachers = {name: actions for name, actions in self.teachers.items() if name != without}
        classes = {name: name for names in (self.students, *teachers.values()) for name in names if name is not None}
        for step, own in enumerate(self.students):
            for preference in decide(Ballot(own or "", teachers, {"": None, **classes}))[0]:
                yield preference, step

    def most_common(self, teacher: str) -> str | None:
        """Return the most common action of a teacher; None where it has none."""
        known = Counter(name for name in self.teachers.get(teacher, ()) if name is not None)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class LeaveOneOut:
    """A teacher in a state: the pairs that are lost and won without it, and those that it backs.

    sides: for each recorded step, "joined" where the student did the same as the teacher against the majority,
    "opposed" where the student did as the majority, else None; None instead of a tuple without a minority vote.
    """

    lost: int
    won: int
    backed: int
    sides: tuple[str | None, ...] | None


def leave_one_out(state: JudgedState, teacher: str) -> LeaveOneOut:
    """Return which pairs of one state depend on a teacher."""
    found = [preference for preference, _ in state.preferences()]
    everyone = {(each.rule, each.chosen, each.rejected) for each in found}
    without = {(each.rule, each.chosen, each.rejected) for each, _ in state.preferences(without=teacher)}
    answer = state.most_common(teacher)
    # a teacher backs a pair by doing what is chosen over the student, or what is rejected in favour of the student
    backed = sum(answer == (each.chosen if each.rejected_by == STUDENT else each.rejected) for each in found)
    winner = found[-1].chosen if found else None  # by either rule the majority does what was chosen
    sides = None
    if winner is not None and answer is not None and answer != winner:
        names = {answer: "joined", winner: "opposed"}
        sides = tuple(None if own is None else names.get(own) for own in state.students)
    return LeaveOneOut(len(everyone - without), len(without - everyone), backed, sides)


@dataclass(frozen=True)
class PatternPair:
    """A pair: the step that it judges, and the first places of its sides in the pattern."""

    step: int
    chosen: int
    rejected: int
    preference: Preference
    chosen_by: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """The decision in a state. reasons: why a step gives no pair; shared: among how many pairs its cost is shared.

    teachers: what each decides; wanted: all preferences among classes, each with the step that it judges; answers: the
    places of the student's first action, and of each teacher's most common one, `NOTHING` for none.
    """

    reasons: tuple[str, ...]
    pairs: tuple[PatternPair, ...]
    duplicates: int
    shared: int
    teachers: tuple[LeaveOneOut, ...]
    wanted: tuple[tuple[Preference, int], ...]
    answers: Places


def patterns(block: StateBlock, classes: ActionClasses) -> Iterator[tuple[AlikeStates, Pattern]]:
    """Yield the states of a block, those with one pattern together."""
    truncated = np.zeros(len(block.actions), dtype=bool)
    truncated[: len(block.steps)] = to_numpy(block.steps["truncated"], null=False)
    class_of = np.where(truncated, NOTHING, classes.class_of)
    for alike in block.alike(MOST_NUMBERS):
        length, students = alike.rows.shape[1], alike.students
        cut, lost = truncated[alike.rows[:, :students]], classes.lost[alike.states, None]
        equalities = np.hstack([_first_equal(block.text_of[alike.rows]), _first_equal(class_of[alike.rows]), cut, lost])
        for same in equal_rows(np.ascontiguousarray(equalities, dtype=np.int32)):
            row, shape = equalities[same[0]].tolist(), (students, alike.samples)
            texts, kinds, flags = row[:length], row[length : 2 * length], row[2 * length :]
            pattern = _pattern(block.teachers, shape, tuple(texts), tuple(kinds), tuple(flags[:-1]), bool(flags[-1]))
            yield AlikeStates(alike.states[same], alike.rows[same], *shape), pattern


def _first_equal(values: Array) -> Array:
    """Return the first place [S, L] in each row [S, L] that holds the same; `NOTHING` stays so."""
    # The states last: NumPy then compares and reduces thousands of them at a time.
    columns = np.ascontiguousarray(values.T)
    places = np.arange(len(columns), dtype=np.int32)[:, None, None]
    first = np.where(columns[:, None] == columns[None], places, len(columns)).min(axis=0)
    return np.where(columns == NOTHING, NOTHING, first).T


@lru_cache(16_384)
def decided(
    student: str, teachers: tuple[tuple[str, tuple[str | None, ...]], ...], kinds: tuple[str | None, ...]
) -> tuple[tuple[tuple[Preference, tuple[str, ...]], ...], str | None]:
    """Return the vote on numbered texts, which most states have in common: `kinds` are their classes, in order."""
    texts = dict.fromkeys(text for text in (student, *chain(*(given for _, given in teachers))) if text is not None)
    ballot = Ballot(student, dict(teachers), dict(zip(texts, kinds, strict=True)))
    preferences, reason = decide(ballot)
    return tuple((preference, tuple(backers(ballot, preference))) for preference in preferences), reason


@lru_cache(16_384)
def _pattern(
    teachers: tuple[str, ...],
    shape: tuple[int, tuple[int, ...]],
    texts: Places,
    classes: Places,
    truncated: Places,
    lost: bool,
) -> Pattern:
    """Decide a pattern: steps and samples of each teacher (`shape`), and what equals what (`texts`, `classes`)."""
    students, samples = shape
    ends = (students + np.cumsum(samples, dtype=int)).tolist()
    places = {name: range(end - number, end) for name, number, end in zip(teachers, samples, ends, strict=True)}
    class_names = [None if place == NOTHING else str(place) for place in classes]
    reasons, votes = list[str](), list[PatternPair]()
    for step in range(students):
        reason, found = _step_pairs(step, places, texts, class_names, bool(truncated[step]), lost)
        reasons += [] if reason is None else [reason]
        votes += found
    sides = [(one.chosen, one.rejected) for one in votes]
    # Steps with equal actions give equal pairs: reversed, so that the first of them is the one that is kept.
    kept = dict(zip(reversed(sides), reversed(votes), strict=True))
    actions = {name: [class_names[place] for place in of] for name, of in places.items()}
    judged = JudgedState(class_names[:students], actions)
    answers = [judged.students[0], *(judged.most_common(name) for name in teachers)]
    return Pattern(
        tuple(reasons),
        tuple(one for side, one in zip(sides, votes, strict=True) if kept[side] is one),
        len(votes) - len(kept),
        len(kept),
        tuple(leave_one_out(judged, name) for name in teachers),
        tuple(judged.preferences()),
        tuple(NOTHING if most is None else int(most) for most in answers),
    )


def _step_pairs(
    step: int,
    places: dict[str, range],
    texts: Places,
    class_names: Sequence[str | None],
    truncated: bool,
    lost: bool,
) -> tuple[str | None, list[PatternPair]]:
    """Return the pairs of one recorded step, or the reason for none."""
    if lost:
        return LOST, []
    if truncated:
        return "student_truncated", []
    if not any(places.values()):
        return "not_asked", []
    given = [place for of in places.values() for place in of]
    class_of = {texts[place]: class_names[place] for place in (*given, step)}
    order = dict.fromkeys(text for text in (texts[step], *(texts[place] for place in given)) if text != NOTHING)
    teachers = tuple(
        (name, tuple(None if texts[place] == NOTHING else str(texts[place]) for place in of))
        for name, of in places.items()
    )
    found, reason = decided(str(texts[step]), teachers, tuple(class_of[text] for text in order))
    return reason, [PatternPair(step, int(one.chosen), int(one.rejected), one, by) for one, by in found]
