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
from composer_stages.comparison.words import SENTENCES
from composer_stages.data_files import load_template
from composer_stages.evaluation.difference import Decision, Difference
from composer_stages.evaluation.inference import TIE
from composer_stages.layout import (
    aligned,
    escape_line,
    folded,
    markdown_table,
    signed,
    width,
    without_middle,
    without_shared_start,
)

if TYPE_CHECKING:
    from composer_stages.comparison.costs import Spent
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
    named = {side.letter: f"{side.letter} ({side.name})" for side in comparison.sides}
    names = named[difference.treatment], named[difference.baseline]
    return SENTENCES.text("decision", comparison, difference, *names, describe_size(comparison, difference), bar)


def _bar(comparison: "LogComparison", margin: float) -> str:
    return f"{100 * margin:.3g}{POINTS}" if comparison.binary else f"{margin:.3g}"


def describe_size(comparison: "LogComparison", result: "Difference | Part") -> str:
    """Return a difference with its interval: "+41.7 points [+29.2, +54.1]"."""
    return f"{_signed(comparison, result.estimate)} {_limits(comparison, result.low, result.high)}"


def _limits(comparison: "LogComparison", *limits: float) -> str:
    low, high = (_signed(comparison, limit).removesuffix(POINTS) for limit in limits)
    return f"[{low}, {high}]"


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
        lines += [SENTENCES.text("gate", results), "", TextTable(rows, head), "", SENTENCES.text("gate_level", results)]
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
    first, *others = map(_spelled, [SENTENCES.text("gate", results)] if results else _decisions(comparison))
    head, *rows = ([_spelled(cell) for cell in row] for row in (_gate(results) if results else _sides(comparison)))
    folded_report = escape(text(comparison, results) + flips(tasks, results))
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
    lines += [SENTENCES.text("corrected", comparison.not_worse)] if len(comparison.differences) > 1 else []
    lines += [SENTENCES.text("positions", comparison.ranking)] if comparison.ranking else []
    if (frontier := comparison.frontier) and len(comparison.sides) > 2:
        lines.append(SENTENCES.text("frontier", frontier))
    settings = (setting for pairing in comparison.pairings for setting in pairing.settings)
    apart = [
        SENTENCES.text("setting", each) for each in settings if each.name in SPACES or MEASURING.fullmatch(each.name)
    ]
    apart += [
        SENTENCES.text("match", pairing.matched) for pairing in comparison.pairings if pairing.matched.num_reworded
    ]
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
    if matched := SENTENCES.text("match", pairing.matched):
        rows.append(("matched", matched))
    if pairing.settings:
        rows.append(("settings", "; ".join(SENTENCES.text("setting", each) for each in pairing.settings)))
    for cost in pairing.costs:
        means = (cost.per_sample, cost.per_success)
        rows.append((cost.quantity, SENTENCES.text("cost", difference, cost, *map(_spent, means))))
    rows += [] if pairing.costs else [("cost", "not recorded, and no tokens")]
    lines: list[Block] = [TextTable(rows)]
    for noun, parts in (("benchmark", pairing.benchmarks), ("category", pairing.categories)):
        largest = sorted(parts, key=lambda part: -abs(part.estimate))[:SHOWN_PARTS] if noun == "category" else parts
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
        head = (noun, "tasks", difference.baseline, difference.treatment, title, "p (Holm)", "")
        lines += ["", TextTable(cells, head, ("left", *["right"] * 5, "left"))] if cells else []
        lines += [f"and {len(parts) - len(largest)} more"] if len(parts) > len(largest) else []
    return lines


def _spent(spent: "Spent | None") -> tuple[str, ...]:
    """Return what both sides spent, and the difference, as texts; nothing where that is not known."""
    if spent is None:
        return ()
    limits = "" if spent.low is None or spent.high is None else f" [{spent.low:+z.3g}, {spent.high:+z.3g}]"
    return f"{spent.baseline:.4g}", f"{spent.treatment:.4g}", f"difference {spent.estimate:+z.3g}{limits}"


def flips(tasks: pa.Table, results: Sequence["MetricResult"], most: int = FLIPS, places: bool = True) -> str:
    """Return tables of the tasks on which each side differs most from the first; empty where none does.

    results: of a policy, each of which has its own. places: with where each side's first sample is, a file and its
    record, or a rollout's address for `composer view`.
    """
    return "".join(f"\n\n{_printed([block])}" for block in _flips(tasks, results, most, places))


def _flips(tasks: pa.Table, results: Sequence["MetricResult"], most: int, places: bool) -> list[Block]:
    tables = list[TextTable]()
    for score, of_score in [(result.metric.score, result.tasks) for result in results] or [("", tasks)]:
        for letter in pc.unique(of_score["side"]).to_pylist():
            rows, num = _most_different(of_score.filter(pc.equal(of_score["side"], letter)), most)
            title = SENTENCES.text("flips", len(rows), num, score)
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


def _value(comparison: "LogComparison", value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %" if comparison.binary else f"{value:.4g}"


def _signed(comparison: "LogComparison", value: float) -> str:
    return f"{signed(value)}{POINTS}" if comparison.binary else f"{value:+z.3g}"


# The page.


class PlottedInterval(NamedTuple):
    """A number with its interval, and how it is written, on a line that goes from `start` to `end`."""

    name: str
    estimate: float
    low: float
    high: float
    start: float
    end: float
    label: str


def page(comparison: "LogComparison", tasks: pa.Table, results: Sequence["MetricResult"] = ()) -> str:
    """Return one page without any other file: the decision, a plot for each comparison, and the report."""
    title, *parts = [*blocks(comparison, results), *_flips(tasks, results, FLIPS, places=True)]
    # As `aligned` does for a terminal: characters that turn the direction of writing do so on a page, too.
    report = [
        part if isinstance(part, str) else part._replace(rows=[list(map(escape_line, row)) for row in part.rows])
        for part in parts
    ]

    def dots(of: "LogComparison", of_score: pa.Table, difference: Difference) -> list[tuple[float, float]]:
        """Return the scores of tasks in A and beside it, of a comparison with A."""
        if of.binary or difference.baseline != "A":
            return []
        plotted = of_score.filter(pc.equal(of_score["side"], difference.treatment)).slice(0, DOTS)
        return list(zip(plotted["baseline"].to_pylist(), plotted["score"].to_pylist(), strict=True))

    template = load_template(__package__, "page.jinja", autoescape=True)
    return template.render(
        title=title,
        report=report,
        shown=[(result.comparison, result.tasks) for result in results] or [(comparison, tasks)],
        intervals=_intervals,
        dots=dots,
        mean_of=mean_of,
    )


def _intervals(comparison: "LogComparison", difference: Difference) -> list[PlottedInterval]:
    """Return the means of both sides, and their difference."""
    rows = [
        PlottedInterval(side.letter, side.mean, side.low, side.high, *comparison.span, _value(comparison, side.mean))
        for side in comparison.sides
        if side.letter in (difference.baseline, difference.treatment)
    ]
    title, row = f"{difference.treatment} - {difference.baseline}", difference
    reach = max(abs(row.low), abs(row.high), comparison.min_gain or 0.0) * 1.1
    label = _signed(comparison, row.estimate)
    return [*rows, PlottedInterval(title, row.estimate, row.low, row.high, -reach, reach, label)]
