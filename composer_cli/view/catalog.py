"""The runs there are, which were made from which, and what a list says of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from composer_cli.report.charts import ticks
from composer_cli.report.facts import METRICS
from composer_cli.show import runs
from composer_cli.show.status import Line, lines
from stages.errors import BadInput
from stages.runs.artifact import Run
from stages.runs.manifest import InputRef
from stages.runs.records import Kind

HEADLINES = ("verdict", "decision", "mean_reward", "pairs", "pairs_per_trace", "arm", "cleaner")
"""Of what a run concluded, what its line in the list shows."""


@dataclass(frozen=True)
class Listed:
    """One line of the list."""

    line: Line
    stage: str
    headline: dict[str, Any]


class Catalog:
    """Runs below a folder, read anew for every page: what happens meanwhile is seen."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def listed(self, text: str = "", stage: str = "", status: str = "") -> list[Listed]:
        """All runs that fit, newest first; `text` is looked for in name, status and reason."""
        found = [
            Listed(line, line.run.partition("/")[0], self._headline(line)) for line in lines(self.root, versions=False)
        ]
        fitting = [
            one
            for one in found
            if text.lower() in f"{one.line.run} {one.line.status} {one.line.reason} {one.headline}".lower()
            and stage in ("", one.stage)
            and status in ("", one.line.status)
        ]
        return sorted(fitting, key=lambda one: one.line.began, reverse=True)

    def _headline(self, line: Line) -> dict[str, Any]:
        if line.status == "unreadable":
            return {}
        summary = Run(self.root / line.run).manifest.summary
        return {name: summary[name] for name in HEADLINES if summary.get(name) is not None}

    def run(self, stage: str, folder: str) -> Run | None:
        """The run of this name; None where there is none, whatever else the name may point to."""
        known = {runs.name(path): path for path in runs.folders(self.root)}
        return Run(known[f"{stage}/{folder}"]) if f"{stage}/{folder}" in known else None

    def made_from(self, run: Run) -> list[Run]:
        """The runs that read this one, oldest first."""
        wanted = (run.manifest.fingerprint, run.path.name)
        return [
            one for one in self._readable() if wanted in {(ref.fingerprint, Path(ref.path).name) for ref in _read(one)}
        ]

    def inputs(self, run: Run) -> list[tuple[str, bool]]:
        """The names of the runs that this one read, and whether they are still there."""
        names = [runs.name(Path(ref.path)) for ref in _read(run)]
        return [(name, (self.root / name / "manifest.json").is_file()) for name in names]

    def with_kind(self, run: Run, kind: Kind) -> list[Run]:
        """Those made from this run, at first or second hand, that hold records of a kind."""
        children = self.made_from(run)
        found = {one.path: one for one in [*children, *(g for child in children for g in self.made_from(child))]}
        return [one for one in found.values() if one.holds(kind) and one.manifest.status == "complete"]

    def _readable(self) -> Sequence[Run]:
        found = []
        for path in runs.folders(self.root):
            try:
                found.append(Run(path))
            except BadInput:
                continue
        return found


def _read(run: Run) -> list[InputRef]:
    return [ref for refs in run.manifest.inputs.values() for ref in refs]


# ---- curves
# Training metrics as drawings: SVG without styles of its own, so that a page's colours hold in light and dark.

WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 150.0, 44.0, 22.0
MOST = 12


@dataclass(frozen=True)
class Curve:
    """One metric: where its line runs, in units of the drawing, and the marks of both axes as (place, label)."""

    title: str
    last: float
    path: str
    marks_x: list[tuple[float, str]]
    marks_y: list[tuple[float, str]]


def curves(run: Run) -> list[Curve]:
    """What a training logged so far, the report's metrics first; before its first line, the rewards it was paid."""
    rows = [orjson.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    series = _series(rows)
    if not series and run.manifest.stage == "train":
        series = {"reward": _rewards(run)}
    return [_curve(METRICS.get(name, name), points) for name, points in series.items() if len(points) > 1][:MOST]


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    names = [*METRICS, *dict.fromkeys(name for row in rows for name in row if name not in METRICS)]
    left_out = {"step", "epoch", "num_tokens"}
    found = {
        name: [(float(row.get("step", i)), float(row[name])) for i, row in enumerate(rows) if _is_number(row.get(name))]
        for name in names
        if name not in left_out
    }
    return {name: points for name, points in found.items() if name in METRICS or len({y for _, y in points}) > 1}


def _rewards(run: Run) -> list[tuple[float, float]]:
    points = []
    for unit in run.units():
        paid = [one["rollout"]["reward"] for one in unit.get("played", []) if one["rollout"]["reward"] is not None]
        points += [(float(unit["training_step"]), sum(paid) / len(paid))] if paid else []
    return sorted(points)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _curve(title: str, points: Sequence[tuple[float, float]]) -> Curve:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across, up = ticks(*_apart(xs), 4), ticks(*_apart(ys), 3)

    def x(value: float) -> float:
        return round(LEFT + (value - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - 8), 1)

    def y(value: float) -> float:
        return round(6 + (1 - (value - up[0]) / (up[-1] - up[0])) * (HEIGHT - BOTTOM - 6), 1)

    path = "M" + " L".join(f"{x(px)},{y(py)}" for px, py in points)
    return Curve(
        title, ys[-1], path, [(x(m), f"{m:g}") for m in across if m == int(m)], [(y(m), f"{m:.4g}") for m in up]
    )


def _apart(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest; where they are the same, some room around them."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
