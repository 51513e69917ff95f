"""Distinct questions, dealt by a digest of their text to worked examples, training and evaluation."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from composer_stages.envs.base import Split
from composer_stages.errors import UsageError
from composer_stages.runs import store

SYSTEM = "Answer with the result only, without explanation."
PARTS, EXAMPLES, RESERVED = 5, frozenset({0}), frozenset({1})
"""A digest deals all questions to five parts: one has the worked examples, one is for evaluation."""
EXHAUSTED = 500
"""After so many draws without a new question there are no more of them."""
MOST_SHOTS = 20

T = TypeVar("T")


def split_parts(split: Split) -> frozenset[int]:
    """Return the parts of a split, where both splits draw from the same questions."""
    return RESERVED if split == "eval" else frozenset(range(PARTS)) - EXAMPLES - RESERVED


def distinct(items: Iterable[T], text: Callable[[T], str], parts: Collection[int]) -> Iterator[T]:
    """Yield what is in these parts by its question's text, each question once, until no new one is drawn."""
    seen, misses = set[str](), 0
    for item in items:
        question = text(item)
        if question in seen or int(store.digest(question)[:8], 16) % PARTS not in parts:
            misses += 1
            if misses == EXHAUSTED:
                return
            continue
        seen.add(question)
        misses = 0
        yield item


def check_shots(shots: object) -> int:
    """Return a number of worked examples; raise UsageError for anything else."""
    if not isinstance(shots, int) or not 0 <= shots <= MOST_SHOTS:
        raise UsageError("envs.skills.shots-out-of-range", shots=shots, limit=MOST_SHOTS)
    return shots


def correction(answer: str, right: str) -> str:
    """Return which answer was wrong, and the right one."""
    wrong = answer.strip()
    return f"{f'{wrong[:200]!r} is wrong' if wrong else 'There is no answer'}; the right answer is {right}"
