"""What follows from who did the same as whom: found once, for all states of a run in which that is the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stages.pairs.audit import JudgedState, Worth, preferences, worth
from stages.pairs.ballots import LOST, decided
from stages.pairs.blocks import Alike, Block, Classes, equal_rows, numbers
from stages.pairs.labels import NOTHING, Array
from stages.pairs.voting import Preference

MOST_NUMBERS = 4_000_000
Places = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A pair: whose step it judges, and where in the pattern its sides stand first."""

    step: int
    chosen: int
    rejected: int
    preference: Preference
    chosen_by: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """What is decided in a state. reasons: why a step gives no pair; shared: among how many pairs its cost is shared.

    worths: of each teacher; wanted: all preferences among classes, each with the step that it judges; says: the places
    of what the student did first, and of what each teacher does most often, `NOTHING` for nothing.
    """

    reasons: tuple[str, ...]
    pairs: tuple[Found, ...]
    duplicates: int
    shared: int
    worths: tuple[Worth, ...]
    wanted: tuple[tuple[Preference, int], ...]
    says: Places


def patterns(block: Block, classes: Classes) -> Iterator[tuple[Alike, Pattern]]:
    """The states of a block, those with one pattern together."""
    truncated = np.zeros(len(block.actions), dtype=bool)
    truncated[: len(block.steps)] = numbers(block.steps["truncated"])
    class_of = np.where(truncated, NOTHING, classes.class_of)
    for alike in (part for one in block.alike() for part in one.parts(MOST_NUMBERS)):
        length, students = alike.rows.shape[1], alike.students
        cut, lost = truncated[alike.rows[:, :students]], classes.lost[alike.states, None]
        told = np.hstack([_first_equal(block.text_of[alike.rows]), _first_equal(class_of[alike.rows]), cut, lost])
        for same in equal_rows(np.ascontiguousarray(told, dtype=np.int32)):
            row, shape = told[same[0]].tolist(), (students, alike.samples)
            texts, kind, flags = row[:length], row[length : 2 * length], row[2 * length :]
            found = _pattern(block.teachers, shape, tuple(texts), tuple(kind), tuple(flags[:-1]), flags[-1])
            yield Alike(alike.states[same], alike.rows[same], *shape), found


def _first_equal(values: Array) -> Array:
    """The first place [S, L] in each row [S, L] that holds the same; `NOTHING` stays so."""
    first = (values[:, :, None] == values[:, None, :]).argmax(axis=2)
    return np.where(values == NOTHING, NOTHING, first)


@lru_cache(16_384)
def _pattern(
    names: tuple[str, ...],
    shape: tuple[int, tuple[int, ...]],
    texts: Places,
    classes: Places,
    truncated: Places,
    lost: int,
) -> Pattern:
    students, samples = shape
    ends = students + np.cumsum(samples, dtype=int)
    said = {name: range(end - number, end) for name, number, end in zip(names, samples, ends.tolist(), strict=True)}
    reasons, votes = list[str](), list[Found]()
    for step in range(students):
        reason, found = _step(step, said, texts, classes, bool(truncated[step]), bool(lost))
        reasons += [] if reason is None else [reason]
        votes += found
    sides = [(one.chosen, one.rejected) for one in votes]
    kept = dict(zip(reversed(sides), reversed(votes), strict=True))
    did = {name: [_name(classes[place]) for place in of] for name, of in said.items()}
    judged = JudgedState([_name(classes[place]) for place in range(students)], did)
    says = [judged.students[0], *(judged.says(name) for name in names)]
    return Pattern(
        tuple(reasons),
        tuple(one for side, one in zip(sides, votes, strict=True) if kept[side] is one),
        len(votes) - len(kept),
        len(kept),
        tuple(worth(judged, name) for name in names),
        tuple(preferences(judged)),
        tuple(NOTHING if most is None else int(most) for most in says),
    )


def _step(
    step: int, said: dict[str, range], texts: Places, classes: Places, truncated: bool, lost: bool
) -> tuple[str | None, list[Found]]:
    """The pairs of one recorded step, or why it gives none."""
    if lost:
        return LOST, []
    if truncated:
        return "student_truncated", []
    if not any(said.values()):
        return "not_asked", []
    teachers = tuple((name, tuple(_name(texts[place]) for place in of)) for name, of in said.items())
    class_of = {texts[place]: classes[place] for of in said.values() for place in of} | {texts[step]: classes[step]}
    order = dict.fromkeys(text for text in (texts[step], *(texts[p] for of in said.values() for p in of)) if text >= 0)
    found, reason = decided(str(texts[step]), teachers, tuple(_name(class_of[text]) for text in order))
    return reason, [Found(step, int(one.chosen), int(one.rejected), one, by) for one, by in found]


def _name(place: int) -> str | None:
    return None if place == NOTHING else str(place)
