"""The record of a difference between two sides on the same tasks, its decision, and why it was decided so.

`evaluate` compares arms, `compare` evaluation logs, `extract-pairs` the actions of pairs, and Python reads what they
found: all of them by `Difference`. Records hold numbers and enumerations; sentences about them are in the templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, NamedTuple

from composer_stages.layout import counted


class Decision(StrEnum):
    """What a paired test shows of a difference."""

    BETTER = "better"
    BETTER_BY_LESS = "better by less"
    """A gain, which is smaller than the smallest one of interest."""
    WORSE = "worse"
    NO_GAIN = "no gain"
    """Less than the smallest gain of interest, which would have been found."""
    NO_DIFFERENCE = "no difference"
    """Less than it in either direction."""
    UNDECIDED = "undecided"


GAINS = (Decision.BETTER, Decision.BETTER_BY_LESS)


class Verdict(StrEnum):
    """The verdict of an evaluation (`composer_stages.evaluation.verdict`)."""

    VALIDATED = "VALIDATED"
    PARTIAL = "PARTIAL"
    INVALIDATED = "INVALIDATED"
    UNDERPOWERED = "UNDERPOWERED"
    INVALID_RUN = "INVALID-RUN"


class Quantity(StrEnum):
    """The unit of a difference: shares of tasks (fractions of one, reported in points), or scores in their own unit."""

    SHARE = "share"
    SCORE = "score"


class ReasonKind(StrEnum):
    """Why a decision was made, or why there is none. The names behind each are those of its values."""

    # What a difference shows, or why it shows nothing.
    REACHES_BAR = auto()  # the smallest gain of interest; also of the next two
    BELOW_BAR = auto()
    MAY_REACH_BAR = auto()
    SIGNIFICANTLY_WORSE = auto()
    GAIN_EXCLUDED = auto()  # it would have been seen
    TOO_FEW_UNITS = auto()  # units, unit, fewest
    LOW_POWER = auto()
    RESTS_ON_LOST = auto()  # num_lost
    RESTS_ON_MISSING = auto()
    RESTS_ON_WEIGHTS = auto()  # num: of benchmarks
    FEW_SEEDS = auto()  # to be about other trainings
    # Why two arms cannot be compared.
    NOT_NAMED = auto()
    ONLY_TWINS = auto()
    DAMAGED = auto()  # arm, seed, error
    NO_ITEMS = auto()  # arm
    REPEATED_ITEMS = auto()  # arm, number
    MANY_ERRORS = auto()  # arm, share, limit
    UNEQUAL_TASKS = auto()  # arm, other, only_arm, only_other; also of the next two
    UNEQUAL_SEEDS = auto()
    UNEQUAL_SAMPLES = auto()
    NO_OUTCOMES = auto()


@dataclass(frozen=True)
class Reason:
    """One reason, with the values of its kind."""

    kind: ReasonKind
    values: Mapping[str, Any]

    @classmethod
    def of(cls, kind: ReasonKind, **values: Any) -> "Reason":
        """Return the reason of a kind with these values."""
        return cls(kind, values)


@dataclass(frozen=True)
class PermutationTest:
    """The permutation test behind a difference.

    flips: assignments of signs that were drawn, None in the normal limit. exact: they are all there are. within_units:
    signs are those of tasks within fixed units. top: the top level of Student's t ("training seeds" or "collections of
    pairs") with `num_top` of them, None below three.
    """

    flips: int | None
    exact: bool
    within_units: bool
    top: str | None = None
    num_top: int = 0


@dataclass(frozen=True)
class MissingOutcomes:
    """What is missing of two sides, by reason, the baseline's first; what it counts as, and what that decides.

    worst, best: the difference if it had ended worst and best for the treatment; None where nothing else is assumed.
    holds: whether the decision is the same in all of these cases.
    """

    by_side: tuple[Mapping[str, int], Mapping[str, int]]
    counted_as: str
    worst: float | None = None
    best: float | None = None
    holds: bool = True


class Size(NamedTuple):
    """The tasks that find a gain, the range in which they lie with 80 % confidence, and the seeds where seeds lack."""

    tasks: int
    fewest: int
    most: int
    seeds: int | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The treatment's rate minus the baseline's, as fractions of one: 0.25 is 25 points.

    >>> gain = compared.differences[0]
    >>> gain.rate, gain.treatment, gain.baseline, gain.num_tasks
    ('pass@1', 'B', 'A', 2)
    """

    rate: str
    """The rate that is compared: "pass@1" (or "pass@1, protocol kept", or either at temperature 0), "hacked",
    "suspect", "protocol", "hidden tests" or "passes by report"; "score" between logs."""
    treatment: str
    """The arm whose rate is the minuend."""
    baseline: str
    """The arm whose rate is subtracted."""
    estimate: float
    """The difference, a fraction of one."""
    low: float
    """The lower end of its 95 % interval."""
    high: float
    """The upper end of its 95 % interval."""
    p_value: float
    """The p-value of its test, paired by task and training seed."""
    p_holm: float | None = None
    """The p-value after Holm's correction, for conduct alone."""
    num_tasks: int
    """Tasks that were compared."""
    num_seeds: int
    """Training seeds that were compared."""
    verdict: str | None = None
    """The verdict of the evaluation, which rests on this difference; None for all but the first."""
    num_units: int
    """How many were drawn independently."""
    unit: str = "family"
    """The noun for one of them."""
    wins: int
    """Tasks on which the treatment is better."""
    losses: int
    """Tasks on which it is worse."""
    decision: Decision = Decision.UNDECIDED
    """What the test shows."""
    reasons: tuple[Reason, ...] = ()
    """Why nothing is decided; empty where something is."""
    quantity: Quantity = Quantity.SHARE
    """The unit of the estimate and its interval."""
    not_worse: bool | None = None
    """Whether the treatment is shown not to be worse by a margin, or to be so; None where neither is shown."""
    alpha: float = 0.05
    """The two-sided level of the interval and the decision."""
    mde: float | None = None
    """Where nothing is decided, the true difference that 80 % of such experiments would find, by simulation."""
    needed: Size | None = None
    """Where nothing is decided, the size that finds the smallest difference of interest in 80 % of cases."""
    elsewhere: tuple[float, float] | None = None
    """The interval for other units, where those played are fixed."""
    num_collections: int = 0
    """Collections of pairs that the trainings learnt from."""
    method: PermutationTest | str = ""
    """The test; of a verdict that was read from its file, in the words there."""
    missing: MissingOutcomes | None = None
    """What logs lack."""

    @property
    def gains(self) -> bool:
        """Return whether a gain is shown, of any size."""
        return self.decision in GAINS

    @property
    def units(self) -> str:
        """What was drawn independently, such as "12 operations"."""
        return counted(self.num_units, self.unit)

    @property
    def too_few(self) -> bool:
        """Return whether the test has too few units to reject anything."""
        return any(reason.kind is ReasonKind.TOO_FEW_UNITS for reason in self.reasons)
