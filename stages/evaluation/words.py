"""Fill the sentences of verdict.jinja about a verdict and about paired differences."""

from dataclasses import dataclass

from composer_stages.evaluation.difference import Difference, PermutationTest
from composer_stages.evaluation.inference import ALPHA, MIN_SEEDS, fewest_units
from composer_stages.evaluation.sentences import Sentences
from composer_stages.evaluation.verdict import LIMITS, EvalVerdict
from composer_stages.layout import p_value, signed
from composer_stages.runs import display

RECOMMENDED_SEEDS = 5
"""With three or four, an interval relies on gains that are normally distributed over trainings (docs/evaluate.md)."""


def points(difference: Difference) -> str:
    """Return a difference in percentage points with its interval and p-value."""
    low, high = signed(difference.low), signed(difference.high)
    return f"{signed(difference.estimate)} points [{low}, {high}], {p_value(difference.p_value)}"


def percent(rate: float | None) -> str:
    """Return a rate in per cent; a dash where nothing was measured."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _interval(difference: Difference) -> str:
    """Return a difference of shares in points with its interval: "+19.4 [+0.7, +38.8] points"."""
    low, high = display.points(difference.low), display.points(difference.high)
    return f"{display.points(difference.estimate)} [{low}, {high}] points"


SENTENCES = Sentences(
    "composer_stages.evaluation",
    "verdict.jinja",
    points=points,
    rate=percent,
    interval=_interval,
    fewest_units=fewest_units,
    setting_of_limit=LIMITS,
    # The share of trainings that must fail for one of so many to fail with a chance of 95 %.
    rarest_failure=lambda num_seeds: f"{100 * (1 - ALPHA ** (1 / num_seeds)):.0f}",
    fewest_seeds=MIN_SEEDS,
    recommended_seeds=RECOMMENDED_SEEDS,
)


@dataclass(frozen=True)
class VerdictWords:
    """A verdict in words: the claim, why, what the interval covers, what is shown and what is not.

    claim: empty where no gain is shown. cut: that limits ended many rollouts before they passed; empty where few were.
    collapsed: a clause for each training that collapsed. shown, not_shown: sentences, each complete without the others.
    """

    claim: str
    why: str
    estimand: str
    cut: str
    collapsed: tuple[str, ...]
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]


def describe_verdict(verdict: EvalVerdict) -> VerdictWords:
    """Return a verdict in words."""
    return VerdictWords(
        claim=SENTENCES.text("claim", verdict),
        why=SENTENCES.text("why", verdict),
        estimand=SENTENCES.text("estimand", verdict),
        cut=SENTENCES.text("cut", verdict.cut),
        collapsed=tuple(SENTENCES.text("collapse", collapse) for collapse in verdict.collapsed),
        shown=tuple(SENTENCES.paragraphs("shown", verdict)),
        not_shown=tuple(SENTENCES.paragraphs("not_shown", verdict)),
    )


def describe_method(test: PermutationTest | str, unit: str) -> str:
    """Return the test of a difference over sampling units with this noun; words of a file as they are."""
    return test if isinstance(test, str) else SENTENCES.text("method", test, unit)
