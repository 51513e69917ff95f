"""The result of a comparison: one screen for a terminal, and one page with a plot of both sides' scores."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.comparison.logs import CANCELLED, ID, ROLLOUT_PAGE
from stages.evaluation.inference import BETTER, NO_GAIN, TIE, WORSE
from stages.layout import (
    aligned,
    counted,
    escape_line,
    folded,
    p_value,
    plural,
    width,
    without_middle,
    without_shared_start,
)

if TYPE_CHECKING:
    from stages.comparison.stage import LogComparison, LogDifference, SideSummary

FLIPS = 20
"""Tasks on which the sides differ that are shown."""
SHOWN_FAMILIES = 15
WIDTH = 100
"""Columns of the report."""
SHOWN_ID = 64
"""Characters of a task's id where not all tasks are printed."""
DOTS = 2000
"""Tasks in a plot."""
POINTS = " points"


def sentence(found: "LogComparison", one: "LogDifference") -> str:
    """Return the decision in one sentence."""
    b, a = _called(found, one.letter), _called(found, "A")
    bar = f"{100 * found.min_gain:.3g}{POINTS}" if found.binary else f"{found.min_gain:.3g}"
    by = f"{difference(found, one)}, {p_value(one.p_holm)}" + ("; lower is better" if found.lower_is_better else "")
    if one.decision == BETTER:
        return f"{b} is better than {a}: {by}."
    if one.decision == WORSE:
        return f"{b} is worse than {a}: {by}."
    if one.decision == NO_GAIN:
        return f"{b} is not better than {a} by {bar}; whether it is worse is not shown: {by}."
    if one.decision == "no difference":
        return f"There is no difference of {bar} between {b} and {a}: {by}."
    if one.too_few:
        return f"Too few to say: {by}; {one.too_few}."
    if one.needed is None:
        return f"Whether {b} is better than {a} depends on how what is missing would have ended: {by}."
    few = f"about {float(f'{one.needed:.2g}'):,.0f} tasks like these find a difference of {bar} in 80 % of cases"
    return f"Too few to say whether {b} is better than {a}: {by}; {few}."


def difference(found: "LogComparison", one: "LogDifference") -> str:
    """Return a difference with its interval: "+41.7 points [+29.2, +54.1]"."""
    low, high = (_signed(found, limit).removesuffix(POINTS) for limit in (one.low, one.high))
    return f"{_signed(found, one.estimate)} [{low}, {high}]"


def text(found: "LogComparison") -> str:
    """Return the result for a terminal, but for the tasks on which the sides differ."""
    # A line break in a name or a note would begin a line that looks like one of the report.
    lines = [escape_line(sentence(found, one)) for one in found.differences]
    if len(found.differences) > 1:
        lines.append("p is after Holm's correction, and intervals are at the level that it leaves each comparison.")
    what = mean_of(found)
    # The long names last, so that numbers stay below their heads where a narrow terminal folds the lines.
    head = ("side", "tasks", "samples", "date", f"{what} [95 %]", "name", "program", "model", "log")
    rows = [_row(found, side) for side in found.sides]
    keep = [at for at in range(len(head)) if any(row[at] for row in rows)]
    table = aligned([[row[at] for at in keep] for row in rows], [head[at] for at in keep])
    if max(map(width, table.split("\n"))) > WIDTH:  # the logs are then named below it
        table = aligned([[row[at] for at in keep[:-1]] for row in rows], [head[at] for at in keep[:-1]])
        table += "\n" + aligned([(f"log ({side.letter})", side.log) for side in found.sides])
    lines += ["", table]
    for one in found.differences:
        lines += ["", *_about(found, one)]
    lines += [escape_line(f"note ({side.letter}): {note}") for side in found.sides for note in side.notes]
    return folded("\n".join(lines), WIDTH)


def mean_of(found: "LogComparison") -> str:
    """Return what the mean of a side is called: no pass where lower is better."""
    return "mean score" if not found.binary else "rate" if found.lower_is_better else "pass rate"


def _row(found: "LogComparison", side: "SideSummary") -> tuple[str, ...]:
    low, high = (_value(found, limit).removesuffix(" %") for limit in (side.low, side.high))
    rate = f"{_value(found, side.mean)} [{low}, {high}]"
    samples = "" if side.samples == "1" and side.seeds == 1 else side.samples
    samples += f" of {side.seeds} seeds" if side.seeds > 1 else ""
    models, programs = ", ".join(side.models), ", ".join(side.programs)
    name = "" if side.name == models else side.name
    return side.letter, f"{side.num_tasks:,}", samples, side.date, rate, name, programs, models, side.log


def _about(found: "LogComparison", one: "LogDifference") -> list[str]:
    """Return how one side's tasks ended beside those of the first, and what limits the comparison."""
    ties = one.num_tasks - one.wins - one.losses
    higher, lower = (one.losses, one.wins) if found.lower_is_better else (one.wins, one.losses)
    rows = [
        (
            f"{one.letter} - A",
            f"{counted(one.num_tasks, 'task')}: {higher:,} higher, {lower:,} lower, {ties:,} the same",
        )
    ]
    if found.lower_is_better or found.direction_was_set:
        named = f" ({', '.join(found.metrics)})" if found.metrics else ""
        who = "was set" if found.direction_was_set else "the logs say"
        rows.append(("direction", f"{'lower' if found.lower_is_better else 'higher'} is better{named}, as {who}"))
    if found.unit:
        units = plural(found.unit)
        how = f"within {units}, of which these are all" if found.fixed else f"by whole {units}"
        rows.append(("resampled", f"{how} ({one.num_units:,})"))
    if any(one.missing):
        sides = [(letter, of) for letter, of in zip(("A", one.letter), one.missing, strict=True) if of]
        named = "; ".join(f"{letter}: {reasons(of)}" for letter, of in sides)
        as_what = {
            "excluded": "left out, tasks on both sides",
            "failed": "counted as failed",
            "bounds": "left out, and the decision must hold however they would have ended",
        }[one.counted_as]
        rows.append(("missing", f"{named} - {as_what} (--missing)"))
        if one.worst is not None and one.best is not None:
            least, most = sorted((one.worst, one.best))
            range_ = f"{_signed(found, least)} to {_signed(found, most)}"
            holds = "" if one.holds else ", so the decision rests on this assumption"
            rows.append(("", f"if they had ended otherwise, the difference would be from {range_}{holds}"))
    if one.matched:
        rows.append(("matched", f"tasks were matched {one.matched}"))
    if one.settings:
        rows.append(("settings", "; ".join(one.settings)))
    lines = [aligned(rows)]
    if one.families:
        shown = sorted(one.families, key=lambda row: -abs(row["B"] - row["A"]))[:SHOWN_FAMILIES]
        cells = [
            (
                row["family"],
                f"{row['tasks']:,}",
                _value(found, row["A"]),
                _value(found, row["B"]),
                _signed(found, row["B"] - row["A"]).removesuffix(POINTS),
                "" if row["p_holm"] is None else f"{row['p_holm']:.3f}",
            )
            for row in shown
        ]
        more = len(one.families) - len(shown)
        head = ("category", "tasks", "A", one.letter, "difference", "p (Holm)")
        lines += ["", aligned(cells, head, ("left", *["right"] * 5))]
        lines += [f"and {more} more"] if more > 0 else []
    return lines


def flips(tasks: pa.Table, most: int, places: bool = False) -> str:
    """Return tables of the tasks on which each side differs most from the first; empty where none does.

    places: with where each side's first sample is, a file and its record, or a rollout's address for `composer view`.
    """
    tables = ""
    for letter in pc.unique(tasks["side"]).to_pylist():
        shown, num = _most_different(tasks.filter(pc.equal(tasks["side"], letter)), most)
        title = f"tasks that differ ({len(shown)} of {num:,}; --flips prints all)" if num > len(shown) else ""
        tables += "\n\n" + _flip_table(shown, letter, title or "tasks that differ", places) if shown else ""
    if places and ROLLOUT_PAGE in tables:
        tables += "\n\nOpen a rollout with: `composer view 'ADDRESS'`"
    return tables


def _most_different(tasks: pa.Table, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return the tasks that fell and rose most, half of each where there are enough, and how many fell or rose.

    Those that fell come first.
    """
    apart = pc.subtract(tasks["score"], tasks["baseline"]).to_numpy()
    fell, rose = np.flatnonzero(apart < -TIE), np.flatnonzero(apart > TIE)
    num = len(fell) + len(rose)
    fell = fell[np.argsort(apart[fell], kind="stable")][: max(most // 2, most - len(rose))]
    rose = rose[np.argsort(-apart[rose], kind="stable")][: most - len(fell)]
    chosen = tasks.take(pa.array(np.concatenate([fell, rose]).astype(np.int64)))
    return [
        {"task": row["task_id"], "A": row["baseline"], "B": row["score"], "at": (row["baseline_place"], row["place"])}
        for row in chosen.to_pylist()
    ], num


def _flip_table(rows: Sequence[Mapping[str, Any]], letter: str, title: str, places: bool) -> str:
    ids = [row["task"] for row in rows]
    ids = ids if places else [without_middle(one, SHOWN_ID) for one in without_shared_start(ids)]
    cells = [[one, f"{row['A']:.4g}", f"{row['B']:.4g}"] for one, row in zip(ids, rows, strict=True)]
    if not (places and any(any(row["at"]) for row in rows)):
        return aligned(cells, (title, "A", letter), ("left", "right", "right"))
    for row, cell in zip(rows, cells, strict=True):
        cell += [_address(place or "") for place in row["at"]]
    return aligned(
        cells, (title, "A", letter, "A is at", f"{letter} is at"), ("left", "right", "right", "left", "left")
    )


def _address(place: str) -> str:
    """Return a place as `composer view` takes it."""
    page, mark, own = place.partition(ID)
    return page + mark + quote(own) if mark else place


def _called(found: "LogComparison", letter: str) -> str:
    side = next(one for one in found.sides if one.letter == letter)
    return f"{letter} ({side.name})"


def _value(found: "LogComparison", value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %" if found.binary else f"{value:.4g}"


def _signed(found: "LogComparison", value: float) -> str:
    return f"{100 * value:+z.1f}{POINTS}" if found.binary else f"{value:+z.3g}"


def reasons(of: Mapping[str, int]) -> str:
    """Return how many samples have no score for each reason, the most frequent first.

    Those that were cancelled come last: what failed before them says why.
    """
    in_order = sorted(of.items(), key=lambda one: (one[0] == CANCELLED, -one[1]))
    return ", ".join(f"{number:,} {reason}" for reason, number in in_order)


# The page.

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.25rem}}pre{{overflow-x:auto;font-size:13px}}svg{{max-width:100%}}</style>
<h1>{title}</h1>{plots}<pre>{text}</pre></html>
"""


def page(found: "LogComparison", tasks: pa.Table) -> str:
    """Return one page without any other file: the decision, a plot for each comparison, and the report."""
    plots = "".join(_plot(found, one, tasks.filter(pc.equal(tasks["side"], one.letter))) for one in found.differences)
    title = escape(sentence(found, found.differences[0]))
    return PAGE.format(title=title, plots=plots, text=escape(text(found) + flips(tasks, FLIPS, places=True)))


def _plot(found: "LogComparison", one: "LogDifference", tasks: pa.Table) -> str:
    """Return both means and their difference with intervals; for scores a dot a task too, A across and B up."""
    sides = [side for side in found.sides if side.letter in ("A", one.letter)]
    low, high = found.scale
    rows = [(side.letter, side.mean, side.low, side.high, low, high) for side in sides]
    reach = max(abs(one.low), abs(one.high), found.min_gain) * 1.1
    rows.append((f"{one.letter} - A", one.estimate, one.low, one.high, -reach, reach))
    parts = []
    for at, (label, mean, least, most, start, end) in enumerate(rows):
        y, scale = 30 + 34 * at, 420 / ((end - start) or 1)
        x0, x1, x = (80 + scale * (value - start) for value in (least, most, mean))
        parts.append(f'<text x="70" y="{y + 5}" text-anchor="end">{label}</text>')
        parts.append(f'<line x1="80" x2="500" y1="{y}" y2="{y}" stroke="#ddd"/>')
        if start < 0 < end:
            zero = 80 - scale * start
            parts.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{y - 12}" y2="{y + 12}" stroke="#888"/>')
        parts.append(f'<line x1="{x0:.1f}" x2="{x1:.1f}" y1="{y}" y2="{y}" stroke="#36c" stroke-width="4"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="#36c"/>')
        shown = _value(found, mean) if at < len(sides) else _signed(found, mean)
        parts.append(f'<text x="510" y="{y + 5}">{shown}</text>')
    width = 640
    if not found.binary:
        shown_tasks = tasks.slice(0, DOTS)
        scale, width = 150 / ((high - low) or 1), 820
        parts.append('<rect x="650" y="10" width="150" height="150" fill="none" stroke="#ddd"/>')
        parts.append('<line x1="650" y1="160" x2="800" y2="10" stroke="#888"/>')
        for a, b in zip(shown_tasks["baseline"].to_pylist(), shown_tasks["score"].to_pylist(), strict=True):
            x, y = 650 + scale * (a - low), 160 - scale * (b - low)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#36c" opacity=".4"/>')
    return f'<svg viewBox="0 0 {width} 170" width="{width}" role="img" font-size="14">{"".join(parts)}</svg>'
