"""Positions of several sides, each with the interval that all pairs together leave it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from composer_stages.evaluation.difference import GAINS, Decision, Difference


@dataclass(frozen=True)
class Ranking:
    """Sides from the best mean on; positions count from 1.

    positions: the first and the last that each may have: one for each side that is shown to be better, and for each
    that is shown to be worse (Mogstad, Romano, Shaikh and Wilhelm, Review of Economic Studies 2024, section 3). With
    pairs at one level together, all of these intervals hold together. alike: runs of positions of which no two are told
    apart.
    """

    letters: tuple[str, ...]
    positions: Mapping[str, tuple[int, int]]
    alike: tuple[tuple[int, int], ...]


def rank(letters: Sequence[str], differences: Sequence[Difference]) -> Ranking:
    """Return the positions of sides, given from the best mean on, by the decisions about all of their pairs."""
    above = {
        (each.treatment, each.baseline) if each.decision in GAINS else (each.baseline, each.treatment)
        for each in differences
        if each.decision in (*GAINS, Decision.WORSE)
    }
    positions = {
        letter: (
            1 + sum((rival, letter) in above for rival in letters),
            len(letters) - sum((letter, rival) in above for rival in letters),
        )
        for letter in letters
    }
    runs = list[tuple[int, int]]()
    for first, last in combinations(range(len(letters)), 2):
        pairs = combinations(letters[first : last + 1], 2)
        if not any((a, b) in above or (b, a) in above for a, b in pairs):
            runs = [run for run in runs if run[0] != first + 1]
            runs += [] if runs and runs[-1][1] >= last + 1 else [(first + 1, last + 1)]
    return Ranking(tuple(letters), positions, tuple(runs))
