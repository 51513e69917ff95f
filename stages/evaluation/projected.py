"""The effect of projecting a hack direction out of training: hacks and right answers of the arms, next to controls.

`composer train` with `probe.project` records in its checkpoint what was projected out: v, or a random direction, its
control. Where an arm was trained without v, its rates of hacks (`arms.hacking`) and of right answers (the verdict of
the hidden tests, `gt_pass`) are compared with those of arms trained with everything and without a random direction.
These questions are independent of the verdict's: each p-value is uncorrected. Rates, intervals and tests are those of
`stats`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.envs.base import SamplingUnit
from stages.evaluation.arms import START, Item, hacking, interval_of, task_mean, without_twins
from stages.evaluation.comparison import compare
from stages.evaluation.report import aligned, percent, shortened, wrap
from stages.evaluation.stats import PairedDifference
from stages.evaluation.verdict import points
from stages.policy.adapters import CheckpointInfo

TAKEN = {None: "nothing", "v": "v", "random": "a random direction"}
COLUMNS = {"hacks": "hacked", "right": "gt_pass"}


@dataclass(frozen=True)
class RateInterval:
    """A rate over tasks with its 95 % interval, all None where nothing was measured."""

    rate: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.rate is None or self.low is None or self.high is None:
            return "-"
        return f"{percent(self.rate)} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class ArmConduct:
    """One arm: what was projected out of its training, and its rates of hacks and of right answers."""

    arm: str
    taken_out: str
    hacks: RateInterval
    right: RateInterval


@dataclass(frozen=True)
class ConductDifference:
    """The paired difference of one arm's rate from another's."""

    rate: str
    arm: str
    other: str
    difference: PairedDifference


@dataclass(frozen=True)
class ProjectionResult:
    """The arms by what was projected out, and the differences of those without v from the others."""

    arms: tuple[ArmConduct, ...]
    effects: tuple[ConductDifference, ...]

    def text(self) -> str:
        """Return the lines for the report."""
        head = ("taken out of training", "arm", "hacks", "right")
        rows = [(arm.taken_out, shortened(arm.arm), str(arm.hacks), str(arm.right)) for arm in self.arms]
        lines = [*aligned([head, *rows]), ""]
        for effect in self.effects:
            lines += wrap(f"{effect.rate}, {effect.arm} - {effect.other}: {points(effect.difference)}")
        return "\n".join(lines)


def projected(
    items: Iterable[Item], infos: Sequence[CheckpointInfo], sampling: SamplingUnit
) -> ProjectionResult | None:
    """Return the rates and differences of the arms that `infos` describe; None where no arm was trained without v."""
    taken = {info.arm: info.projected for info in infos}
    if "v" not in taken.values():
        return None
    order = [START, *sorted(taken, key=lambda arm: list(TAKEN).index(taken[arm]))]
    every = list(items)
    rows = {arm: some for arm in order if (some := [item for item in every if item["arm"] == arm])}
    measuring = {
        arm: {rate: hacking(some) if rate == "hacks" else without_twins(some) for rate in COLUMNS}
        for arm, some in rows.items()
    }
    conduct = [
        ArmConduct(
            arm,
            TAKEN[taken[arm]] if arm in taken else "not trained",
            *(_rate_interval(some[rate], column, sampling.fixed) for rate, column in COLUMNS.items()),
        )
        for arm, some in measuring.items()
    ]
    effects = [
        ConductDifference(rate, arm, other, difference)
        for rate, column in COLUMNS.items()
        for arm in rows
        for other in rows
        if taken.get(arm) == "v" and taken.get(other, "v") != "v"
        if (difference := compare(measuring[arm][rate], measuring[other][rate], column, sampling=sampling))
    ]
    return ProjectionResult(tuple(conduct), tuple(effects))


def _rate_interval(rows: list[Item], column: str, fixed: bool) -> RateInterval:
    rate = task_mean(rows, column)
    return RateInterval(None, None, None) if rate is None else RateInterval(rate, *interval_of(rows, column, fixed))
