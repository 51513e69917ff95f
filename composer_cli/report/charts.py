"""Charts of the page: where marks lie in rows of bars, in per cent of their width, and training curves as SVG."""

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from composer_cli.console import duration
from composer_cli.report.facts import titles

Facts = Mapping[str, Any]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover an interval, about as many as wanted."""
    span = max(high - low, 1e-9)
    rough = span / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def place(value: float, marks: Sequence[float]) -> float:
    """Where a value lies between the first and the last mark, in per cent."""
    return round(100 * (value - marks[0]) / max(marks[-1] - marks[0], 1e-9), 2)


def arms(evaluation: Facts) -> dict[str, Any]:
    """Rows of pass@1 with intervals, in points; `marks` are the axis."""
    measured = [arm for arm in evaluation["arms"] if arm["pass_rate"] is not None]
    marks = ticks(*_limits([(100 * arm["low"], 100 * arm["high"]) for arm in measured], within=(0.0, 100.0)))
    rows = [
        {"label": arm["arm"], **_interval(arm["low"], arm["pass_rate"], arm["high"], marks), **arm} for arm in measured
    ]
    return {"marks": [(mark, place(mark, marks)) for mark in marks], "rows": rows}


def differences(evaluation: Facts, of: str = "pass@1") -> dict[str, Any]:
    """Rows of paired differences with intervals, in points; zero is always on the axis."""
    shown = [d for d in evaluation["differences"] if d["of"] == of]
    marks = ticks(*_limits([(100 * d["low"], 100 * d["high"]) for d in shown] + [(-2.0, 2.0)]))
    rows = [{"label": d["title"], **_interval(d["low"], d["estimate"], d["high"], marks), **d} for d in shown]
    return {"marks": [(mark, place(mark, marks)) for mark in marks], "rows": rows, "zero": place(0.0, marks)}


def _interval(low: float, mid: float, high: float, marks: Sequence[float]) -> dict[str, float]:
    left, right = place(100 * low, marks), place(100 * high, marks)
    return {"left": left, "width": round(right - left, 2), "dot": place(100 * mid, marks)}


def _limits(intervals: Iterable[tuple[float, float]], within: tuple[float, float] | None = None) -> tuple[float, float]:
    ends = [end for interval in intervals for end in interval] or list(within or (0.0, 1.0))
    low, high = min(ends), max(ends)
    return (max(low, within[0]), min(high, within[1])) if within else (low, high)


def curves(trainings: Sequence[Facts]) -> list[dict[str, Any]]:
    """For each metric that was logged: its title, and a drawing with a line for every training that has it."""
    colour = colours(training["arm"] for training in trainings)
    drawn = []
    for name, title in titles([name for t in trainings for row in t["steps"] for name in row]).items():
        series = [(t, [(row["step"], row[name]) for row in t["steps"] if row.get(name) is not None]) for t in trainings]
        series = [(training, points) for training, points in series if len(points) > 1]
        if series:
            drawn.append({"name": name, "title": title, "svg": _lines(name, series, colour)})
    return drawn


def _lines(name: str, series: Sequence[tuple[Facts, list[tuple[int, float]]]], colour: Mapping[str, int]) -> str:
    """The drawing as SVG, equal bytes for equal numbers; the page colours the lines by their ids."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(3.4, 1.7), layout="constrained")
        axes = figure.add_subplot()
        for number, (training, points) in enumerate(series):
            (line,) = axes.plot(*zip(*points, strict=True), linewidth=1.4)
            line.set_gid(f"c{colour[training['arm']]}:{name}:{number}")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def bars(counts: Mapping[str, int], of: int) -> list[dict[str, Any]]:
    """Rows of counts, the largest first, as shares of `of`."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [
        {"label": name.replace("_", " "), "count": n, "width": round(100 * n / max(of, 1), 2)} for name, n in ordered
    ]


def colours(names: Iterable[str]) -> dict[str, int]:
    """A colour for every arm; the untrained start is 0, which is grey."""
    trained = [name for name in dict.fromkeys(names) if name != "start"]
    return {"start": 0, **{name: 1 + number % 6 for number, name in enumerate(sorted(trained))}}


def percent(rate: float | None) -> str:
    """A share as per cent; a dash where nothing was measured."""
    return "\u2013" if rate is None else f"{100 * rate:.1f} %"


def points(share: float) -> str:
    """A difference of shares in points, with its sign."""
    return f"{100 * share:+.1f}".replace("-", "\u2212")


def size(share: float | None) -> str:
    """A share in points, without a sign; a dash where none is known."""
    return "\u2013" if share is None else f"{100 * share:.1f}"


def small_p(p: float) -> str:
    """A p-value; small ones are only said to be small."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def short(number: float) -> str:
    """A number without needless digits."""
    return f"{number:,.4g}".replace("-", "\u2212")


def downloadable(text: str) -> str:
    """A text as an address that holds it, for a link that saves it."""
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


FORMATS: dict[str, Callable[..., str]] = {
    "percent": percent,
    "points": points,
    "size": size,
    "small_p": small_p,
    "short": short,
    "duration": duration,
    "downloadable": downloadable,
}
