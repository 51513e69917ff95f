"""What the pages show of runs besides their facts: the searchable list with headlines, and training curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_cli.report.charts import ticks
from composer_cli.show.facts import METRICS, metric_rows
from composer_cli.show.runs import RunLine, lines
from stages.runs.artifact import Run

HEADLINES = ("verdict", "decision", "mean_reward", "pairs", "pairs_per_trace", "arm", "cleaner")
"""The conclusions of a run that its line in the list shows."""
WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 150.0, 44.0, 22.0
MOST = 12
"""Curves on a page."""


@dataclass(frozen=True)
class ListedRun:
    """One line of the list."""

    line: RunLine
    stage: str
    headline: dict[str, Any]


def listed(root: Path) -> list[ListedRun]:
    """Return all runs with their headlines, newest first."""
    found = []
    for line in lines(root, versions=False):
        summary = {} if line.status == "unreadable" else Run(root / line.run).manifest.summary
        headline = {name: summary[name] for name in HEADLINES if summary.get(name) is not None}
        found.append(ListedRun(line, line.run.partition("/")[0], headline))
    return sorted(found, key=lambda one: one.line.began, reverse=True)


def fits(one: ListedRun, text: str, stage: str, status: str) -> bool:
    """Whether a run is of this stage and status, and the text occurs in its name, status, reason or headline.

    An empty word fits every run.
    """
    searched = f"{one.line.run} {one.line.status} {one.line.reason} {one.headline}".lower()
    return text.lower() in searched and stage in ("", one.stage) and status in ("", one.line.status)


@dataclass(frozen=True)
class MetricCurve:
    """One metric as an SVG path without styles, so that a page's colours hold in light and dark.

    Places are in units of the drawing, WIDTH by HEIGHT; marks of both axes are pairs (place, label).
    """

    title: str
    last: float
    path: str
    marks_x: list[tuple[float, str]]
    marks_y: list[tuple[float, str]]


def curves(run: Run) -> list[MetricCurve]:
    """Return curves of the metrics logged so far, the report's first; other metrics that are constant are left out."""
    rows = metric_rows(run)
    series: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys([*METRICS, *(name for row in rows for name in row)]):
        points = [
            (float(row.get("step", i)), float(value))
            for i, row in enumerate(rows)
            if isinstance(value := row.get(name), (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ]
        if name in METRICS or (name not in ("step", "epoch", "num_tokens") and len({y for _, y in points}) > 1):
            series[name] = points
    return [_curve(METRICS.get(name, name), points) for name, points in series.items() if len(points) > 1][:MOST]


def _curve(title: str, points: Sequence[tuple[float, float]]) -> MetricCurve:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    marks = []
    for values, wanted in ((xs, 4), (ys, 3)):
        low, high = min(values), max(values)
        marks.append(ticks(low, high, wanted) if high > low else ticks(low - 0.5, high + 0.5, wanted))
    across, up = marks

    def x(value: float) -> float:
        return round(LEFT + (value - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - 8), 1)

    def y(value: float) -> float:
        return round(6 + (1 - (value - up[0]) / (up[-1] - up[0])) * (HEIGHT - BOTTOM - 6), 1)

    path = "M" + " L".join(f"{x(px)},{y(py)}" for px, py in points)
    return MetricCurve(
        title, ys[-1], path, [(x(m), f"{m:g}") for m in across if m == int(m)], [(y(m), f"{m:.4g}") for m in up]
    )
