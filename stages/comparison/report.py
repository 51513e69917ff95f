"""The result of a comparison: one screen for a terminal, and one page with a plot of both sides' scores."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ID, ROLLOUT_PAGE
from composer_stages.comparison.tables import MEASURING, SPACES
from composer_stages.comparison.words import SENTENCES, describe_match, describe_setting
from composer_stages.evaluation.difference import Decision, Difference
from composer_stages.evaluation.inference import TIE
from composer_stages.layout import (
    aligned,
    escape_line,
    folded,
    markdown_table,
    width,
    without_middle,
    without_shared_start,
)

if TYPE_CHECKING:
    from composer_stages.comparison.costs import Frontier, Spent
    from composer_stages.comparison.decision import LogComparison, Pairing, SideSummary
    from composer_stages.comparison.gate import MetricResult
    from composer_stages.comparison.measure import Part


class TextTable(NamedTuple):
    """A part of the report: rows below a head, which is empty for a list of names and what is said of them."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    sides: Sequence[str] | None = None


Block = str | TextTable
"""A line of the report, empty between parts, or a table."""
FLIPS = 20
"""Tasks on which the sides differ that are shown."""
SHOWN_PARTS = 15
WIDTH = 100
"""Columns of the report."""
SHOWN_ID = 64
"""Characters of a task's id where not all tasks are printed."""
DOTS = 2000
"""Tasks in a plot."""
POINTS = " points"
MARKUP = re.compile(r"[\\`*_\[\]<>&|@#~:!]")


def describe_decision(comparison: "LogComparison", difference: Difference) -> str:
    """Return the decision in one sentence."""
    bar = "" if comparison.min_gain is None else _bar(comparison, comparison.min_gain)
    names = [_name_side(comparison, letter) for letter in (difference.treatment, difference.baseline)]
    return SENTENCES.text("decision", comparison, difference, *names, describe_size(comparison, difference), bar)


def _bar(comparison: "LogComparison", margin: float) -> str:
    return f"{100 * margin:.3g}{POINTS}" if comparison.binary else f"{margin:.3g}"


def describe_size(comparison: "LogComparison", found: "Difference | Part") -> str:
    """Return a difference with its interval: "+41.7 points [+29.2, +54.1]"."""
    return f"{_signed(comparison, found.estimate)} {_limits(comparison, found.low, found.high)}"


def _limits(comparison: "LogComparison", *limits: float) -> str:
    low, high = (_signed(comparison, limit).removesuffix(POINTS) for limit in limits)
    return f"[{low}, {high}]"


def describe_policy(results: Sequence["MetricResult"]) -> str:
    """Return whether the gate of a policy passes, in one sentence."""
    return SENTENCES.text("gate", results)


def _gate(results: Sequence["MetricResult"]) -> list[list[str]]:
    """Return the table of a policy with its head: what was shown of each metric."""
    rows = [["metric", "A", "B", "B - A", "has to be", ""]]
    for result in results:
        comparison, metric = result.comparison, result.metric
        margin = metric.not_worse or (metric.better if isinstance(metric.better, float) else None)
        rows.append(
            [
                metric.score,
                *(_value(comparison, side.mean) for side in comparison.sides),
                describe_size(comparison, comparison.differences[0]),
                SENTENCES.text("rule", metric, _bar(comparison, margin) if margin else ""),
                {True: "passes", False: "fails", None: "not shown"}[result.passes],
            ]
        )
    return rows


def text(comparison: "LogComparison", results: Sequence["MetricResult"] = ()) -> str:
    """Return the result for a terminal, but for the tasks on which the sides differ. results: of a policy."""
    return folded(_printed(blocks(comparison, results)), WIDTH)


def _printed(parts: Iterable[Block]) -> str:
    return "\n".join(part if isinstance(part, str) else aligned(*part) for part in parts)


def blocks(comparison: "LogComparison", results: Sequence["MetricResult"] = ()) -> list[Block]:
    """Return the report, but for the tasks on which the sides differ. results: of a policy."""
    lines = list[Block]()
    if results:
        head, *rows = _gate(results)
        lines += [describe_policy(results), "", TextTable(rows, head), "", SENTENCES.text("gate_level", results)]
        for result in results:
            first, *following = blocks(result.comparison)
            lines += ["", f"{result.metric.score}: {first}", *following]
        return lines
    # A line break in a name or a note would begin a line that looks like one of the report.
    lines += _decisions(comparison)
    head, *rows = _sides(comparison)
    table = TextTable(rows, head)
    if max(map(width, aligned(*table).split("\n"))) > WIDTH:  # the logs are then named below it
        table = TextTable([row[:-1] for row in rows], head[:-1])
        lines += ["", table, TextTable([(f"log ({side.letter})", side.log) for side in comparison.sides])]
    else:
        lines += ["", table]
    said = {side.letter: SENTENCES.text("measured", side) for side in comparison.sides}
    if len({*said.values()}) == 1:
        said = {"": said["A"]}
    named = [(f"score ({letter})" if letter else "score", text) for letter, text in said.items() if text]
    lines += ["", TextTable(named)] if named else []
    others = list[tuple[str, str]]()
    for difference, pairing in zip(comparison.differences, comparison.pairings, strict=True):
        if difference.baseline == "A":
            lines += ["", *_details(comparison, difference, pairing)]
        else:
            title = f"{difference.treatment} - {difference.baseline}"
            others.append((title, SENTENCES.text("tasks", comparison, difference)))
    lines += ["", TextTable(others)] if others else []
    lines += [escape_line(f"note ({side.letter}): {note}") for side in comparison.sides for note in side.notes]
    return lines


def markdown(comparison: "LogComparison", tasks: pa.Table, results: Sequence["MetricResult"] = ()) -> str:
    """Return the result as a comment in Markdown: the decision, the sides or the policy, and the report folded."""
    first, *others = map(_spelled, [describe_policy(results)] if results else _decisions(comparison))
    head, *rows = ([_spelled(cell) for cell in row] for row in (_gate(results) if results else _sides(comparison)))
    folded_report = escape(text(comparison, results) + flips(tasks, FLIPS, places=True))
    details = f"<details><summary>report</summary>\n\n<pre>{folded_report}</pre>\n\n</details>\n"
    return "\n\n".join([f"**{first}**", *others, markdown_table(rows, head), details])


def _spelled(line: str) -> str:
    """Return a line of which Markdown shows every character: ids and names make no links, mentions or tags."""
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", escape_line(line))


def _decisions(comparison: "LogComparison") -> list[str]:
    """Return the decisions about all pairs, what limits them, and what was measured otherwise."""
    lines = [SENTENCES.text("itself", side) for side in comparison.sides if side.copy_of]
    for difference, pairing in zip(comparison.differences, comparison.pairings, strict=True):
        lines.append(describe_decision(comparison, difference))
        if comparison.not_worse:
            lines.append(SENTENCES.text("not_worse", difference, _bar(comparison, comparison.not_worse)))
        if noise := pairing.noise:
            size = _signed(comparison, noise.limit).lstrip("+")
            lines.append(SENTENCES.text("noise", difference, noise, size))
    lines += [SENTENCES.text("corrected")] if len(comparison.differences) > 1 else []
    lines += [SENTENCES.text("positions", comparison.ranking)] if comparison.ranking else []
    if (frontier := comparison.frontier) and len(comparison.sides) > 2:
        lines.append(SENTENCES.text("frontier", frontier))
    settings = (setting for pairing in comparison.pairings for setting in pairing.settings)
    apart = [describe_setting(each) for each in settings if each.name in SPACES or MEASURING.fullmatch(each.name)]
    apart += [describe_match(pairing.matched) for pairing in comparison.pairings if pairing.matched.num_reworded]
    lines += [SENTENCES.text("measured_apart", apart)] if apart else []
    return list(map(escape_line, lines))


def _sides(comparison: "LogComparison") -> list[list[str]]:
    """Return the table of sides with its head, without the columns that are empty."""
    # The long names last, so that numbers stay below their heads where a narrow terminal folds the lines.
    rate = f"{mean_of(comparison)} [95 %]"
    head = ("side", "position", "tasks", "samples", "date", rate, "name", "program", "model", "log")
    rows = [_row(comparison, side) for side in comparison.sides]
    filled = [at for at in range(len(head)) if any(row[at] for row in rows)]
    return [[row[at] for at in filled] for row in (head, *rows)]


def mean_of(comparison: "LogComparison") -> str:
    """Return what the mean of a side is called: no pass where lower is better."""
    if comparison.outcome != "mean":
        return comparison.outcome
    return "mean score" if not comparison.binary else "rate" if comparison.lower_is_better else "pass rate"


def _row(comparison: "LogComparison", side: "SideSummary") -> tuple[str, ...]:
    low, high = (_value(comparison, limit).removesuffix(" %") for limit in (side.low, side.high))
    rate = f"{_value(comparison, side.mean)} [{low}, {high}]"
    samples = "" if side.samples == "1" and side.seeds == 1 else side.samples
    samples += f" of {side.seeds} {'judges' if comparison.judged else 'seeds'}" if side.seeds > 1 else ""
    first, last = comparison.ranking.positions[side.letter] if comparison.ranking else (0, 0)
    position = f"{first}" if first == last else f"{first} to {last}"
    models, programs = ", ".join(side.models), ", ".join(side.programs)
    name = "" if side.name == models else side.name
    position = position if comparison.ranking else ""
    tasks = f"{side.num_rated:,}" + ("" if side.num_rated == side.num_tasks else f" ({side.num_tasks:,} in the log)")
    return side.letter, position, tasks, samples, side.date, rate, name, programs, models, side.log


def _details(comparison: "LogComparison", difference: Difference, pairing: "Pairing") -> list[Block]:
    """Return how one side's tasks ended beside those of the first, and what limits the comparison."""
    title = f"{difference.treatment} - {difference.baseline}"
    rows = [(title, SENTENCES.text("tasks", comparison, difference))]
    if comparison.lower_is_better or comparison.direction_was_set:
        rows.append(("direction", SENTENCES.text("direction", comparison)))
    if comparison.judged:
        rows.append(("judges", SENTENCES.text("judges", difference.num_seeds)))
    if comparison.unit:
        rows.append(("resampled", SENTENCES.text("resampled", comparison, difference)))
    elif clusters := pairing.clusters:
        size = _limits(comparison, clusters.low, clusters.high)
        rows.append(("clusters", SENTENCES.text("clusters", clusters, size)))
    missing = difference.missing
    if missing and any(missing.by_side):
        rows.append(("missing", SENTENCES.text("missing", difference)))
        if missing.worst is not None and missing.best is not None:
            limits = (_signed(comparison, bound) for bound in sorted((missing.worst, missing.best)))
            rows.append(("", SENTENCES.text("bounds", difference, *limits)))
        elif not comparison.scale:
            rows.append(("", SENTENCES.text("unbounded")))
    if matched := describe_match(pairing.matched):
        rows.append(("matched", matched))
    if pairing.settings:
        rows.append(("settings", "; ".join(map(describe_setting, pairing.settings))))
    for cost in pairing.costs:
        means = (cost.per_sample, cost.per_success)
        rows.append((cost.quantity, SENTENCES.text("cost", difference, cost, *map(_spent, means))))
    rows += [] if pairing.costs else [("cost", "not recorded, and no tokens")]
    lines: list[Block] = [TextTable(rows)]
    for what, parts in (("benchmark", pairing.benchmarks), ("category", pairing.categories)):
        largest = sorted(parts, key=lambda part: -abs(part.estimate))[:SHOWN_PARTS] if what == "category" else parts
        cells = [
            (
                escape_line(part.name) or SENTENCES.text("alike"),
                f"{part.num_tasks:,}",
                _value(comparison, part.baseline),
                _value(comparison, part.treatment),
                describe_size(comparison, part).replace(POINTS, ""),
                "" if part.p_holm is None else f"{part.p_holm:.3f}",
                "" if part.decision == Decision.UNDECIDED else part.decision.value,
            )
            for part in largest
        ]
        head = (what, "tasks", difference.baseline, difference.treatment, title, "p (Holm)", "")
        lines += ["", TextTable(cells, head, ("left", *["right"] * 5, "left"))] if cells else []
        lines += [f"and {len(parts) - len(largest)} more"] if len(parts) > len(largest) else []
    return lines


def _spent(found: "Spent | None") -> tuple[str, ...]:
    """Return what both sides spent, and the difference, as texts; nothing where that is not known."""
    if found is None:
        return ()
    limits = "" if found.low is None or found.high is None else f" [{found.low:+z.3g}, {found.high:+z.3g}]"
    return f"{found.baseline:.4g}", f"{found.treatment:.4g}", f"difference {found.estimate:+z.3g}{limits}"


def flips(tasks: pa.Table, most: int, places: bool = False) -> str:
    """Return tables of the tasks on which each side differs most from the first; empty where none does.

    places: with where each side's first sample is, a file and its record, or a rollout's address for `composer view`.
    """
    return "".join(f"\n\n{_printed([block])}" for block in _flips(tasks, most, places))


def _flips(tasks: pa.Table, most: int, places: bool) -> list[Block]:
    tables = list[TextTable]()
    for letter in pc.unique(tasks["side"]).to_pylist():
        rows, num = _most_different(tasks.filter(pc.equal(tasks["side"], letter)), most)
        title = SENTENCES.text("flips", len(rows), num)
        tables += [_flip_table(rows, letter, title, places)] if rows else []
    in_pages = places and any(ROLLOUT_PAGE in cell for table in tables for row in table.rows for cell in row[3:])
    return [*tables, *([SENTENCES.text("address")] if in_pages else [])]


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


def _flip_table(rows: Sequence[Mapping[str, Any]], letter: str, title: str, places: bool) -> TextTable:
    ids = [row["task"] for row in rows]
    ids = ids if places else [without_middle(name, SHOWN_ID) for name in without_shared_start(ids)]
    cells = [[name, f"{row['A']:.4g}", f"{row['B']:.4g}"] for name, row in zip(ids, rows, strict=True)]
    if not (places and any(any(row["at"]) for row in rows)):
        return TextTable(cells, (title, "A", letter), ("left", "right", "right"))
    for row, cell in zip(rows, cells, strict=True):
        cell += [_address(address or "") for address in row["at"]]
    return TextTable(
        cells, (title, "A", letter, "A is at", f"{letter} is at"), ("left", "right", "right", "left", "left")
    )


def _address(address: str) -> str:
    """Return the address of a sample as `composer view` takes it."""
    page, mark, rollout_id = address.partition(ID)
    return page + mark + quote(rollout_id) if mark else address


def _name_side(comparison: "LogComparison", letter: str) -> str:
    side = next(side for side in comparison.sides if side.letter == letter)
    return f"{letter} ({side.name})"


def _value(comparison: "LogComparison", value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %" if comparison.binary else f"{value:.4g}"


def _signed(comparison: "LogComparison", value: float) -> str:
    return f"{100 * value:+z.1f}{POINTS}" if comparison.binary else f"{value:+z.3g}"


# The page.

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.25rem}}h1,p,.said td:last-child{{overflow-wrap:anywhere}}svg{{max-width:100%;height:auto}}
div{{overflow-x:auto;margin:1.2rem 0}}table{{border-collapse:collapse;font-size:14px}}
th,td{{padding:.15rem 1.2rem .15rem 0;text-align:left;vertical-align:top;white-space:nowrap}}
th{{border-bottom:1px solid #bbb}}.said td:last-child{{white-space:normal}}
.right{{text-align:right;font-variant-numeric:tabular-nums}}</style>
<h1>{title}</h1>{plots}{report}</html>
"""


def page(comparison: "LogComparison", tasks: pa.Table, results: Sequence["MetricResult"] = ()) -> str:
    """Return one page without any other file: the decision, a plot for each comparison, and the report."""
    title, *lines = [*blocks(comparison, results), *_flips(tasks, FLIPS, places=True)]
    plots = ""
    for shown in [result.comparison for result in results] or [comparison]:
        plots += "".join(
            _plot(shown, difference, tasks.filter(pc.equal(tasks["side"], difference.treatment)))
            for difference in shown.differences
        )
        plots += _plot_frontier(shown, shown.frontier) if shown.frontier else ""
    return PAGE.format(title=escape(str(title)), plots=plots, report="".join(map(_html, lines)))


def _html(block: Block) -> str:
    """Return a block of the report as HTML."""
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>\n" if block else ""
    sides = block.sides or ["left"] * len(block.rows[0])

    def row(cells: Sequence[str], tag: str) -> str:
        texts = zip(cells, sides, strict=True)
        return f"<tr>{''.join(f'<{tag} class={side}>{escape(cell)}</{tag}>' for cell, side in texts)}</tr>\n"

    head = row(block.head, "th") if block.head else ""
    kind = "" if block.head else " class=said"
    return f"<div><table{kind}>\n{head}{''.join(row(cells, 'td') for cells in block.rows)}</table></div>\n"


def _plot_frontier(comparison: "LogComparison", frontier: "Frontier") -> str:
    """Return the sides by what a sample costs, across, and their means with intervals, up; the frontier is a line."""
    low, high = comparison.span
    sides = sorted(comparison.sides, key=lambda side: side.costs[frontier.column])
    scale, most = 130 / ((high - low) or 1), sides[-1].costs[frontier.column] * 1.15
    points = {
        side.letter: (80 + 420 * side.costs[frontier.column] / most, 150 - scale * (side.mean - low)) for side in sides
    }
    line = " ".join(
        f"{points[side.letter][0]:.1f},{points[side.letter][1]:.1f}"
        for side in sides
        if side.letter in frontier.letters
    )
    parts = [
        '<path d="M80 20V150H500" fill="none" stroke="#888"/>',
        f'<polyline points="{line}" fill="none" stroke="#36c" stroke-dasharray="4"/>',
        f'<text x="500" y="168" text-anchor="end">{frontier.quantity} a sample, up to {most:.3g}</text>',
        f'<text x="80" y="14">{mean_of(comparison)}</text>',
    ]
    for side in sides:
        x, y = points[side.letter]
        y0, y1 = (150 - scale * (limit - low) for limit in (side.low, side.high))
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y0:.1f}" y2="{y1:.1f}" stroke="#bbb" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#36c"/>')
        parts.append(f'<text x="{x + 8:.1f}" y="{y - 4:.1f}">{side.letter}</text>')
    return _svg(640, 175, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" font-size="14">{"".join(parts)}</svg>'


def _plot(comparison: "LogComparison", difference: Difference, tasks: pa.Table) -> str:
    """Return both means and their difference with intervals; for scores a dot a task too, A across and B up."""
    sides = [side for side in comparison.sides if side.letter in (difference.baseline, difference.treatment)]
    low, high = comparison.span
    rows = [(side.letter, side.mean, side.low, side.high, low, high) for side in sides]
    reach = max(abs(difference.low), abs(difference.high), comparison.min_gain or 0.0) * 1.1
    title = f"{difference.treatment} - {difference.baseline}"
    rows.append((title, difference.estimate, difference.low, difference.high, -reach, reach))
    parts = []
    for at, (name, mean, least, most, start, end) in enumerate(rows):
        y, scale = 30 + 34 * at, 420 / ((end - start) or 1)
        x0, x1, x = (80 + scale * (value - start) for value in (least, most, mean))
        parts.append(f'<text x="70" y="{y + 5}" text-anchor="end">{name}</text>')
        parts.append(f'<line x1="80" x2="500" y1="{y}" y2="{y}" stroke="#ddd"/>')
        if start < 0 < end:
            zero = 80 - scale * start
            parts.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{y - 12}" y2="{y + 12}" stroke="#888"/>')
        parts.append(f'<line x1="{x0:.1f}" x2="{x1:.1f}" y1="{y}" y2="{y}" stroke="#36c" stroke-width="4"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="#36c"/>')
        label = _value(comparison, mean) if at < len(sides) else _signed(comparison, mean)
        parts.append(f'<text x="510" y="{y + 5}">{label}</text>')
    width = 640
    if not comparison.binary and difference.baseline == "A":
        plotted = tasks.slice(0, DOTS)
        scale, width = 150 / ((high - low) or 1), 820
        parts.append('<rect x="650" y="10" width="150" height="150" fill="none" stroke="#ddd"/>')
        parts.append('<line x1="650" y1="160" x2="800" y2="10" stroke="#888"/>')
        for a, b in zip(plotted["baseline"].to_pylist(), plotted["score"].to_pylist(), strict=True):
            x, y = 650 + scale * (a - low), 160 - scale * (b - low)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#36c" opacity=".4"/>')
    return _svg(width, 170 if width > 640 else 120, parts)
