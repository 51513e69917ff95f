"""Measure the difference of two sides: paired outcomes in, a `Difference` with its decision out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_stages.evaluation.difference import Difference, PermutationTest, Reason, ReasonKind
from composer_stages.evaluation.inference import (
    ALPHA,
    MIN_GAIN,
    TIE,
    PairedTest,
    decide_difference,
    fewest_units,
    numbered,
)
from composer_stages.evaluation.outcomes import PairedOutcomes


@dataclass(frozen=True)
class Comparison:
    """Two sides: their paired outcomes, the test of these, and the difference in numbers."""

    outcomes: PairedOutcomes
    test: PairedTest
    difference: Difference


def paired_test(outcomes: PairedOutcomes, *, fixed: bool = False, scores: bool = False) -> PairedTest:
    """Return the test of paired outcomes. fixed: units are strata. scores: outcomes are no shares of successes."""
    sides = outcomes.treatment_ST[None], outcomes.baseline_ST[None]
    collection_S = numbered(outcomes.collections) if any(outcomes.collections) else None
    return PairedTest(*sides, outcomes.unit_T, fixed=fixed, collection_S=collection_S, scores=scores)


def measure_difference(
    outcomes: PairedOutcomes,
    tests: Sequence[PairedTest],
    *,
    min_gain: float = MIN_GAIN,
    alpha: float = ALPHA,
    margin_alpha: float | None = None,
    p_value: float | None = None,
    fewest: int | None = None,
    two_sided: bool = False,
    fixed: bool = False,
    **names: Any,
) -> Difference:
    """Return the difference of two sides in shares, as the first test estimates it and as all tests bound it.

    tests: of the outcomes, and with lost ones imputed where the decision must survive that. margin_alpha: the level of
    what is about `min_gain`. p_value: of the first test where it is known. fewest: units below which nothing is
    decided, by default those with which the test can reject. names: the fields of the difference that say what is
    compared.
    """
    test, limits = tests[0], [test.interval(alpha) for test in tests]
    gain_T = outcomes.gain_T
    fewest = fewest_units(alpha) if fewest is None else fewest
    reasons = list[Reason]()
    if test.num_flipped < fewest:
        unit = "task" if fixed else names.get("unit", "task")
        reasons = [Reason.of(ReasonKind.TOO_FEW_UNITS, units=test.num_flipped, unit=unit, fewest=fewest)]
    top = None
    if test.top_error_X is not None:
        top = "training seeds" if test.num_top == test.num_seeds else "collections of pairs"
    return Difference(
        estimate=float(test.estimate_X[0]),
        low=min(float(low_X[0]) for low_X, _ in limits),
        high=max(float(high_X[0]) for _, high_X in limits),
        p_value=float(test.p()[0]) if p_value is None else p_value,
        num_tasks=len(gain_T),
        num_units=len(set(outcomes.units)),
        num_seeds=len(outcomes.seeds),
        wins=int((gain_T > TIE).sum()),
        losses=int((gain_T < -TIE).sum()),
        num_collections=len(set(outcomes.collections) - {""}),
        decision=decide_difference(
            tests, min_gain, alpha, margin_alpha=margin_alpha, fewest=fewest, two_sided=two_sided
        ),
        reasons=tuple(reasons),
        alpha=alpha,
        method=PermutationTest(test.flips.num_draws, test.flips.exact, fixed, top, test.num_top if top else 0),
        **names,
    )
