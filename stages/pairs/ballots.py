"""The vote in a state: what each recorded step there gives, a preference or the reason for none."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import pyarrow as pa

from stages.envs.base import Environment, Task
from stages.pairs.blocks import Block, Classes
from stages.pairs.canonical import form
from stages.pairs.labels import NOTHING, class_names
from stages.pairs.outcomes import NotReproducible, State, outcomes
from stages.pairs.states import AnsweredState, names
from stages.pairs.voting import Ballot, Preference, backers, decide, distinct, merged
from stages.runs.records import Row

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
