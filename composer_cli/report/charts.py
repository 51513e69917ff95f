"""Charts of the page: positions of marks in rows of bars, in per cent of the width, and training curves as SVG."""

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from composer_cli.show.facts import metric_titles
from stages.layout import duration


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers that cover an interval, about as many as wanted."""
    # An interval of no width (all rollouts passed) still needs an axis.
    span = max(high - low, 1e-9)
    rough = span / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def place(value: float, marks: Sequence[float]) -> float:
    """Return the position of a value between the first and the last mark, in per cent."""
    return round(100 * (value - marks[0]) / max(marks[-1] - marks[0], 1e-9), 2)


def arms(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows of pass@1 with intervals, in points; `marks` are the axis."""
    measured = [arm for arm in evaluation["arms"] if arm["pass_rate"] is not None]
    ends = [100 * arm[end] for arm in measured for end in ("low", "high")] or [0.0, 100.0]
    marks = ticks(max(min(ends), 0.0), min(max(ends), 100.0))
    rows = [{"label": arm["arm"], **_interval(arm, "pass_rate", marks), **arm} for arm in measured]
    return {"marks": [(mark, place(mark, marks)) for mark in marks], "rows": rows}


def differences(evaluation: Mapping[str, Any], of: str = "pass@1") -> dict[str, Any]:
    """Return rows of paired differences with intervals, in points; zero is always on the axis."""
    shown = [d for d in evaluation["differences"] if d["of"] == of]
    # At least 2 points to either side of zero, so that a difference of nothing is not drawn as a large one.
    ends = [*(100 * d[end] for d in shown for end in ("low", "high")), -2.0, 2.0]
    marks = ticks(min(ends), max(ends))
    rows = [{"label": d["title"], **_interval(d, "estimate", marks), **d} for d in shown]
    return {"marks": [(mark, place(mark, marks)) for mark in marks], "rows": rows, "zero": place(0.0, marks)}


def _interval(measured: Mapping[str, Any], mid: str, marks: Sequence[float]) -> dict[str, float]:
    """Return the places of an interval of shares (`low` to `high`) and of its estimate `mid`, in per cent."""
    left, right = place(100 * measured["low"], marks), place(100 * measured["high"], marks)
    return {"left": left, "width": round(right - left, 2), "dot": place(100 * measured[mid], marks)}


def curves(trainings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each logged metric its title, and a drawing with a line for every training that has it."""
    numbers = colours(training["arm"] for training in trainings)
    drawn: list[dict[str, Any]] = []
    for name, title in metric_titles([name for t in trainings for row in t["steps"] for name in row]).items():
        series = [(t, [(row["step"], row[name]) for row in t["steps"] if row.get(name) is not None]) for t in trainings]
        series = [(training, points) for training, points in series if len(points) > 1]
        if series:
            # The first drawing has the page's whole width, the others share rows.
            drawn.append({"name": name, "title": title, "svg": _lines(name, series, numbers, wide=not drawn)})
    return drawn


def legend(trainings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each arm and its losses, with the seeds that were trained: an arm has one colour."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for training in trainings:
        seeds.setdefault((training["arm"], training["losses"]), []).append(training["seed"])
    return [
        {"arm": arm, "losses": losses, "seeds": f"{len(of_arm)} seeds" if len(of_arm) > 1 else f"seed {of_arm[0]}"}
        for (arm, losses), of_arm in seeds.items()
    ]


def _lines(
    name: str,
    series: Sequence[tuple[Mapping[str, Any], list[tuple[int, float]]]],
    numbers: Mapping[str, int],
    *,
    wide: bool,
) -> str:
    """Return the drawing as SVG, equal bytes for equal numbers; the page colours the lines by their ids."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Matplotlib salts ids with a random number and writes the date unless told otherwise. Text stays text.
    with rc_context({"svg.hashsalt": "composer", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7.6, 2.4) if wide else (3.4, 1.7), layout="constrained")
        axes = figure.add_subplot()
        for number, (training, points) in enumerate(series):
            (line,) = axes.plot(*zip(*points, strict=True), linewidth=1.4)
            line.set_gid(f"c{colour(numbers[training['arm']])}:{name}:{number}")
            line.set_linestyle(DASHES[dash(numbers[training["arm"]])])
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def bars(counts: Mapping[str, int], of: int) -> list[dict[str, Any]]:
    """Return rows of counts, the largest first, as shares of `of`."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [
        {"label": name.replace("_", " "), "count": n, "width": round(100 * n / max(of, 1), 2)} for name, n in ordered
    ]


def colours(names: Iterable[str]) -> dict[str, int]:
    """Return a number for every arm, by which it is drawn; the untrained start is 0, which is grey.

    `colour` and `dash` turn it into one of the PALETTE colours and a style of line: a pair that no two arms share up to
    36 arms.
    """
    trained = sorted(set(names) - {"start"})
    return {"start": 0, **{name: 1 + number for number, name in enumerate(trained)}}


def colour(number: int) -> int:
    """Return the colour of an arm's number: 0 for grey, else one of PALETTE."""
    return 0 if number == 0 else 1 + (number - 1) % PALETTE


def dash(number: int) -> int:
    """Return the style of line of an arm's number, an index of DASHES."""
    return max(number - 1, 0) // PALETTE % len(DASHES)


PALETTE = 12
"""Colours of arms besides grey, c1 to c12 in the style sheets."""
DASHES: tuple[Literal["solid", "dashed", "dotted"], ...] = ("solid", "dashed", "dotted")


FORMATS: dict[str, Callable[..., str]] = {
    "percent": lambda rate: "\u2013" if rate is None else f"{100 * rate:.1f} %",  # a dash where nothing was measured
    "points": lambda share: f"{100 * share:+.1f}".replace("-", "\u2212"),  # a difference of shares, with its sign
    "size": lambda share: "\u2013" if share is None else f"{100 * share:.1f}",  # a share in points, without a sign
    "small_p": lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}",
    "short": lambda number: f"{number:,.4g}".replace("-", "\u2212"),
    "duration": duration,
    "hue": lambda number: f"c{colour(number)} d{dash(number)}",  # classes of what is drawn for an arm
    "downloadable": lambda text: f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}",
}
"""Filters of the page's template: numbers as text, and a text as the address of a link that saves it."""
