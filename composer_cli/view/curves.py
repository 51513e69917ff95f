"""Training curves as SVG paths, of one run or of several arms and seeds, and the timeline of a rollout.

A colour is an arm's, a thin line a seed's, and a thick line the mean of an arm's seeds at the steps that all have.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer_cli.show.blocks import Points, Training, colours, ticks
from composer_cli.show.facts import METRICS
from stages.runs.kinds import Row

WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 150.0, 44.0, 22.0
MOST = 12
"""Charts on a page."""
MOST_POINTS = 400
"""Points of a line: a drawing has fewer pixels."""
NOT_DRAWN = ("step", "epoch", "num_tokens")


@dataclass(frozen=True)
class CurveLine:
    """One line: the number of its arm's colour, an SVG path, and whether it is thin (a seed among several)."""

    label: str
    number: int
    path: str
    thin: bool = False


@dataclass(frozen=True)
class MetricChart:
    """One metric as SVG paths without styles, so that a page's colours hold in light and dark.

    Positions are in units of the drawing, WIDTH by HEIGHT; marks of both axes are pairs (position, label).
    `last` is the newest value of a single training.
    """

    title: str
    last: float | None
    lines: list[CurveLine]
    marks_x: list[tuple[float, str]]
    marks_y: list[tuple[float, str]]


def charts(trainings: Sequence[Training]) -> list[MetricChart]:
    """Return charts of the metrics, those with a title first; other metrics that are constant are left out."""
    numbers = colours(one.arm for one in trainings)
    drawn = []
    for name in dict.fromkeys([*METRICS, *(name for one in trainings for name in one.series)]):
        having = [one for one in trainings if len(one.series.get(name, ())) > 1]
        varies = len({value for one in having for _, value in one.series[name]}) > 1
        if having and (name in METRICS or (name not in NOT_DRAWN and varies)):
            drawn.append(_chart(METRICS.get(name, name), name, having, numbers))
    return drawn[:MOST]


def legend(trainings: Sequence[Training]) -> list[tuple[str, str, int, int]]:
    """Return name, losses, colour number and number of seeds of each arm."""
    arms: dict[tuple[str, str], set[str]] = {}
    for one in trainings:
        arms.setdefault((one.arm, one.losses), set()).add(one.seed)
    numbers = colours(arm for arm, _ in arms)
    return [(arm, losses, numbers[arm], len(seeds)) for (arm, losses), seeds in sorted(arms.items())]


def _chart(title: str, name: str, trainings: Sequence[Training], numbers: dict[str, int]) -> MetricChart:
    every = [point for one in trainings for point in one.series[name]]
    axes = []
    for values, wanted in (([x for x, _ in every], 4), ([y for _, y in every], 3)):
        low, high = min(values), max(values)
        # A constant metric still needs an axis of some width.
        axes.append(ticks(low, high, wanted) if high > low else ticks(low - 0.5, high + 0.5, wanted))
    across, up = axes

    def position(x: float, y: float) -> tuple[float, float]:
        """Return a point's position in the drawing; SVG counts down from the top."""
        return (
            round(LEFT + (x - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - 8), 1),
            round(6 + (1 - (y - up[0]) / (up[-1] - up[0])) * (HEIGHT - BOTTOM - 6), 1),
        )

    def path(points: Points) -> str:
        # Every n-th point and the last, which is the newest.
        shown = points[:: math.ceil(len(points) / MOST_POINTS)]
        shown = shown if shown[-1] == points[-1] else [*shown, points[-1]]
        return "M" + " L".join("{},{}".format(*position(x, y)) for x, y in shown)

    seeds = {arm: [one for one in trainings if one.arm == arm] for arm in dict.fromkeys(one.arm for one in trainings)}
    lines = [
        CurveLine(f"arm {one.arm}, seed {one.seed}", numbers[one.arm], path(one.series[name]), thin=len(some) > 1)
        for some in seeds.values()
        for one in some
    ]
    for arm, some in seeds.items():
        if len(some) > 1 and len(mean := mean_of(one.series[name] for one in some)) > 1:
            lines.append(CurveLine(f"arm {arm}, mean of {len(some)} seeds", numbers[arm], path(mean)))
    marks_x = [(position(mark, up[0])[0], f"{mark:g}") for mark in across if mark == int(mark)]
    marks_y = [(position(across[0], mark)[1], f"{mark:.4g}") for mark in up]
    last = trainings[0].series[name][-1][1] if len(trainings) == 1 else None
    return MetricChart(title, last, lines, marks_x, marks_y)


@dataclass(frozen=True)
class TimelineBar:
    """The time that a step waited for the model (`answer`) or a command, with its place and width in per cent."""

    step: int
    what: str
    seconds: float
    x: float
    width: float


def timeline(steps: Sequence[Row]) -> list[TimelineBar]:
    """Return the answers and commands of a rollout one after the other; empty where no durations were recorded."""
    columns = {"answer": "latency_s", "command": "command_s"}
    parts = [(row["step"], what, row[name]) for row in steps for what, name in columns.items() if row.get(name)]
    total, before, bars = sum(seconds for *_, seconds in parts), 0.0, list[TimelineBar]()
    for step, what, seconds in parts:
        bars.append(TimelineBar(step, what, seconds, round(100 * before / total, 2), round(100 * seconds / total, 2)))
        before += seconds
    return bars


def mean_of(series: Iterable[Points]) -> Points:
    """Return the mean of several series at the steps that all of them have."""
    each = [dict(points) for points in series]
    steps = sorted(set.intersection(*(set(one) for one in each)))
    return [(step, sum(one[step] for one in each) / len(each)) for step in steps]
