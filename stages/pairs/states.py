"""Distinct states with the teachers' actions in them, and who did what in each, by names of classes.

Steps and answers are joined and sorted on disk by DuckDB, once and one after the other, since each may take all of its
memory; then they come one state after the other, however often they are gone through.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from stages.envs.base import Environment, Task
from stages.errors import BadInput
from stages.pairs.blocks import NOTHING, Array, Block, Classes, Cut, class_names, open_database, rows_of
from stages.pairs.voting import (
    Ballot,
    NotReproducible,
    Preference,
    State,
    backers,
    decide,
    distinct,
    form,
    merged,
    outcomes,
)
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import STEP, TEACHER_ACTION, Row

ROLLOUTS = """
CREATE TABLE rollouts AS SELECT rollout_id, row_number() OVER (ORDER BY rollout_id) AS place
FROM (SELECT DISTINCT rollout_id FROM steps)
"""
STATES = """
CREATE TABLE states AS SELECT state_sha256, row_number() OVER (ORDER BY first) - 1 AS n FROM (
    SELECT state_sha256, min(place * 4294967296 + step) AS first
    FROM steps JOIN rollouts USING (rollout_id) GROUP BY state_sha256
)
"""
"""Numbered in the order of rollouts and steps."""
STEPS = """
CREATE TABLE sorted_steps AS SELECT n, state_sha256, rollout_id, task_id, step, action, truncated,
prompt_delta_token_ids IS NOT NULL AS has_ids
FROM steps JOIN states USING (state_sha256) ORDER BY n, rollout_id, step
"""
ANSWERS = """
CREATE TABLE sorted_answers AS SELECT n, teacher,
CASE WHEN finish_reason IS DISTINCT FROM 'length' THEN action END AS whole,
coalesce(nullif(served_model, ''), model) AS served,
CASE WHEN error_type IS NULL THEN cost_usd ELSE coalesce(cost_usd, 0) END AS cost_usd
FROM answers JOIN states USING (state_sha256) ORDER BY n, file_row_number
"""
"""A call that failed without a bill cost nothing."""
MEMORY_MB, MORE_MB = 150, 15
"""What DuckDB may take to join and sort, and for each million rows where that is more: less has not been enough."""
BLOCK = 8192
"""States of which arrays are in memory together."""


@dataclass(frozen=True)
class AnsweredState:
    """A distinct state with the teachers' actions in it, one a sample; None for no answer, or one that was cut off.

    steps: all that were recorded in it, in the order of rollouts, with their rollout, task, action, whether that was
    cut off, and `has_ids`, whether their token ids are known; the first is of the rollout that reached the state
    first. A teacher that was not asked there has no samples; it counts when majorities are taken.
    """

    digest: str
    steps: list[Row]
    teachers: dict[str, list[str | None]] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        """The task of the rollout that reached the state first."""
        return str(self.steps[0]["task_id"])


class AnsweredStates:
    """The distinct states of a run, in the order of rollouts and steps, read anew whenever they are gone through.

    `folder` is for what does not fit into memory. `BadInput` when the answers belong to other rollouts.
    """

    def __init__(self, rollouts: Run, answers: Run, folder: Path) -> None:
        _same_origin(rollouts, answers)
        steps, given = rollouts.scan(STEP), answers.scan(TEACHER_ACTION)
        memory = max(MEMORY_MB, MORE_MB * (len(steps) + len(given)) // 10**6)
        self._database = open_database(folder, f"{memory}MB", steps=steps, answers=given)
        for table in (ROLLOUTS, STATES):
            self._database.execute(table)
        ordered = "SELECT teacher FROM answers GROUP BY teacher ORDER BY min(file_row_number)"
        self.teachers = [name for (name,) in self._database.execute(ordered).fetchall()]
        self._way = lru_cache(8)(self._read_way)

    def __enter__(self) -> "AnsweredStates":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._database.close()

    def __len__(self) -> int:
        return self._number("SELECT count(*) FROM states")

    def _number(self, question: str) -> int:
        ((number,),) = self._database.execute(question).fetchall()
        return int(number)

    @property
    def num_steps(self) -> int:
        """Of all rollouts."""
        return self._number("SELECT count(*) FROM steps")

    @property
    def num_rollouts(self) -> int:
        """Those that have steps."""
        return self._number("SELECT count(DISTINCT rollout_id) FROM steps")

    def per_task(self) -> dict[str, int]:
        """The number of distinct states that each task's rollouts went through."""
        question = "SELECT task_id, count(DISTINCT state_sha256) FROM steps GROUP BY task_id"
        return dict(self._database.execute(question).fetchall())

    @cached_property
    def _sorted(self) -> tuple[str, str]:
        """Questions for steps and answers in the order of states: a table keeps the order in which it was made."""
        for table in (STEPS, ANSWERS):
            self._database.execute(table)
        return "FROM sorted_steps", "FROM sorted_answers"

    def __iter__(self) -> Iterator[AnsweredState]:
        steps, given_answers = (rows_of(self._database, question) for question in self._sorted)
        answers = groupby(given_answers, key=itemgetter("n"))
        at, given = next(answers, (-1, iter(())))
        for n, rows in groupby(steps, key=itemgetter("n")):
            recorded = list(rows)
            state = AnsweredState(recorded[0]["state_sha256"], recorded, {name: [] for name in self.teachers})
            if at == n:
                for row in given:
                    state.teachers[row["teacher"]].append(row["whole"])
                at, given = next(answers, (-1, iter(())))
            yield state

    def digests(self) -> Iterator[str]:
        """Of all states, in order."""
        for row in rows_of(self._database, "SELECT state_sha256 FROM states ORDER BY n"):
            yield row["state_sha256"]

    def blocks(self, most: int = BLOCK) -> Iterator[Block]:
        """The same states as arrays, so many at a time."""
        number = len(self)
        with self._database.cursor() as recorded, self._database.cursor() as given:
            steps, answers = (
                Cut(one.sql(question).to_arrow_reader(most))
                for one, question in zip((recorded, given), self._sorted, strict=True)
            )
            for begin in range(0, number, most):
                end = min(begin + most, number)
                yield Block.of(begin, end, self.teachers, steps.until(end), answers.until(end))

    def way(self, state: AnsweredState) -> list[tuple[str, str]]:
        """What was done and observed before a state, in the rollout that reached it first."""
        return self._way(state.steps[0]["rollout_id"])[: state.steps[0]["step"]]

    def _read_way(self, rollout_id: str) -> list[tuple[str, str]]:
        question = "SELECT action, observation FROM steps WHERE rollout_id = ? ORDER BY step"
        with self._database.cursor() as cursor:
            return cursor.execute(question, [rollout_id]).fetchall()


def explored(digest: str, share: float) -> bool:
    """Whether a state is in a random share of all: by its digest, so that everybody agrees on it."""
    return int(digest[:12], 16) < share * 16**12


def _same_origin(rollouts: Run, answers: Run) -> None:
    asked = answers.manifest.inputs["rollouts"][0]
    if asked.content != rollouts.manifest.content:
        raise BadInput(
            f"{answers.path} answers the rollouts of {asked.path}, not those of {rollouts.path}. "
            "Give the rollouts it was asked about, or rerun replay-teachers on these."
        )


@lru_cache(65_536)
def _short(name: str) -> str:
    return store.digest(name)[:16]


def names(state: AnsweredState, known: Mapping[str, str | None]) -> Row:
    """Who did what, by short names of classes that mean the same in every state."""
    short = {text: None if name is None else _short(name) for text, name in known.items()}
    return {
        "students": [None if step["truncated"] else short[step["action"]] for step in state.steps],
        "teachers": {name: [t and short[t] for t in texts] for name, texts in state.teachers.items()},
    }


def blindly_asked(answers: Run) -> Callable[[Block], Array]:
    """Whether states [S] have answers that were not asked for because of others: any has, where there was no gate."""
    gate = answers.manifest.config.get("gate") or {"rule": "off"}

    def blind(block: Block) -> Array:
        asked = block.asked
        if gate["rule"] == "off":
            return asked
        digests = block.broadcast_from_rank0("state_sha256").to_pylist()
        return asked & np.array([explored(digest, gate["explore"]) for digest in digests], dtype=bool)

    return blind


# ---- ballots
# The vote in a state: what each recorded step there gives, a preference or the reason for none.

LOST = "state_not_reproducible"
Way = Sequence[tuple[str, str]]
"""Actions and what each of them showed."""


def vote(state: AnsweredState, task: Task, make: Callable[[], Environment] | None, way: Way = ()) -> Row:
    """Every recorded step's preferences or reason for none, and how actions were compared.

    make: the environment in which actions whose forms differ are run, after `way`; None compares texts alone.
    """
    texts = dict.fromkeys(
        text
        for text in [*(step["action"] for step in state.steps), *chain(*state.teachers.values())]
        if text is not None
    )
    forms = {text: form(text) for text in texts}
    compared_by, known, reproducible = "canonical", dict[str, str](), True
    candidates = {form: text for text, form in reversed(forms.items()) if form is not None}
    if make is not None and len(candidates) > 1:
        try:
            order = distinct(list(forms.values()))
            reached = State(task, tuple(action for action, _ in way), tuple(seen for _, seen in way))
            known = dict(zip(order, outcomes(make, reached, [candidates[form] for form in order]), strict=True))
            compared_by = "outcome"
        except NotReproducible:
            reproducible = False
    classes = merged(forms, known)
    votes = [_ballot(state, step, classes) for step in state.steps]
    if not reproducible:
        votes = [{"pairs": [], "reason": LOST} for _ in state.steps]
    return {"votes": votes, "compared_by": compared_by, **names(state, class_names(classes, forms))}


def recorded(block: Block, records: Iterable[Row]) -> Classes:
    """The classes of a block as `vote` found them in each of its states."""
    known: dict[str, int] = {}
    steps, answers, compared_by, lost = list[int](), list[int](), list[str](), list[bool]()
    for record in records:
        compared_by.append(record["compared_by"])
        lost.append(record["votes"][0]["reason"] == LOST)
        for numbers, said in (
            (steps, record["students"]),
            (answers, chain(*(record["teachers"][name] for name in block.teachers))),
        ):
            numbers += [NOTHING if name is None else known.setdefault(name, len(known)) for name in said]
    return Classes(np.array(steps + answers, dtype=np.int64), list(known), pa.array(compared_by), np.array(lost))


def _ballot(state: AnsweredState, step: Row, classes: dict[str, str | None]) -> Row:
    if step["truncated"]:
        return {"pairs": [], "reason": "student_truncated"}
    if not any(state.teachers.values()):
        return {"pairs": [], "reason": "not_asked"}
    texts, kinds = Numbers(), Numbers()
    student = texts[step["action"]]
    teachers = tuple((name, tuple(texts[text] for text in said)) for name, said in state.teachers.items())
    found, reason = decided(student, teachers, tuple(kinds[classes[text]] for text in texts if text is not None))
    spelled = {number: text for text, number in texts.items()}
    pairs = [
        {**vars(p), "chosen": spelled[p.chosen], "rejected": spelled[p.rejected], "chosen_by": list(by)}
        for p, by in found
    ]
    return {"pairs": pairs, "reason": reason}


class Numbers(dict[str | None, str | None]):
    """Texts by the order in which they are first asked for; None stays None."""

    def __missing__(self, text: str | None) -> str | None:
        self[text] = None if text is None else str(len(self))
        return self[text]


@lru_cache(16_384)
def decided(
    student: str, teachers: tuple[tuple[str, tuple[str | None, ...]], ...], kinds: tuple[str | None, ...]
) -> tuple[tuple[tuple[Preference, tuple[str, ...]], ...], str | None]:
    """The vote on numbered texts, of which most states have the same few: `kinds` are their classes, in order."""
    texts = dict.fromkeys(text for text in (student, *chain(*(said for _, said in teachers))) if text is not None)
    ballot = Ballot(student, dict(teachers), dict(zip(texts, kinds, strict=True)))
    preferences, reason = decide(ballot)
    return tuple((preference, tuple(backers(ballot, preference))) for preference in preferences), reason
