"""What taking a hack direction out of training did: hacks and right answers of the arms, beside their controls.

`composer train` with `probe.project` names in its checkpoint what was taken out: v, or a random direction, the control
of it. Where an arm was trained without v, its rates of hacks (`arms.hacking`) and of right answers (the verdict of the
hidden tests, `gt_pass`) stand beside those of arms that were trained with all of it and without a random direction.
These questions are beside the verdict's: their p-values are each for itself. Rates, intervals and tests are those of
`stats`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from stages.evaluation.arms import START, Item, hacking, task_means, without_twins
from stages.evaluation.comparison import compare
from stages.evaluation.report import aligned, percent, shortened, wrap
from stages.evaluation.stats import PairedDifference, Rate
from stages.evaluation.verdict import points
from stages.policy.adapters import CheckpointInfo

TAKEN = {None: "nothing", "v": "v", "random": "a random direction"}
COLUMNS = {"hacks": "hacked", "right": "gt_pass"}


@dataclass(frozen=True)
class Share:
    """A rate over tasks with its 95 % interval, all of them None where nothing was measured."""

    rate: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.rate is None or self.low is None or self.high is None:
            return "-"
        return f"{percent(self.rate)} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Conduct:
    """One arm: what was taken out of its training, and its shares of hacks and of right answers."""

    arm: str
    taken_out: str
    hacks: Share
    right: Share


@dataclass(frozen=True)
class Effect:
    """By how much one arm's rate lies above another's, paired."""

    rate: str
    arm: str
    other: str
    difference: PairedDifference


@dataclass(frozen=True)
class Projected:
    """The arms by what was taken out, and the differences of those without v from the others."""

    arms: tuple[Conduct, ...]
    effects: tuple[Effect, ...]

    def as_json(self) -> dict[str, object]:
        """What `projected.json` holds."""
        return asdict(self)

    def text(self) -> str:
        """For the report."""
        head = ("taken out of training", "arm", "hacks", "right")
        rows = [(arm.taken_out, shortened(arm.arm), str(arm.hacks), str(arm.right)) for arm in self.arms]
        lines = [*aligned([head, *rows]), ""]
        for effect in self.effects:
            lines += wrap(f"{effect.rate}, {effect.arm} - {effect.other}: {points(effect.difference)}")
        return "\n".join(lines)


def projected(items: Iterable[Item], infos: Sequence[CheckpointInfo], fixed: bool) -> Projected | None:
    """The rates and differences of items of arms that were trained as `infos` say; None where no arm lacks v.

    `fixed`: families are fixed strata, and tasks the units.
    """
    taken = {info.arm: info.projected for info in infos}
    if "v" not in taken.values():
        return None
    order = [START, *sorted(taken, key=lambda arm: list(TAKEN).index(taken[arm]))]
    every = list(items)
    rows = {arm: some for arm in order if (some := [item for item in every if item["arm"] == arm])}
    conduct = [
        Conduct(
            arm,
            TAKEN[taken[arm]] if arm in taken else "not trained",
            *(_share(_seen(some, rate), column, fixed) for rate, column in COLUMNS.items()),
        )
        for arm, some in rows.items()
    ]
    effects = [
        Effect(rate, arm, other, difference)
        for rate, column in COLUMNS.items()
        for arm in rows
        for other in rows
        if taken.get(arm) == "v" and taken.get(other, "v") != "v"
        if (difference := compare(_seen(rows[arm], rate), _seen(rows[other], rate), column, fixed=fixed))
    ]
    return Projected(tuple(conduct), tuple(effects))


def _seen(rows: list[Item], rate: str) -> list[Item]:
    return hacking(rows) if rate == "hacks" else without_twins(rows)


def _share(rows: list[Item], column: str, fixed: bool) -> Share:
    means = task_means(rows, column)
    if not means:
        return Share(None, None, None)
    families = {item["task_id"]: item["task_id"] if fixed else item["family"] or item["task_id"] for item in rows}
    units = np.unique([families[task] for task in means], return_inverse=True)[1]
    values = np.array(list(means.values()))
    return Share(float(values.mean()), *Rate(values, units).interval())
