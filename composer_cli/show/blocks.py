"""The blocks of a section about a run: values and how to format them, for pages, text and JSON alike.

`sections` makes them from a run, `pages/blocks.html.j2` renders them as HTML, `as_text` as text, and `as_json` as JSON.
A new block is a class here and a macro in that template. Tables are `composer_stages.runs.display.Table`.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from composer_cli.show.rollout import ShownMessage
from composer_stages.runs.display import Table

Points = list[tuple[float, float]]
PALETTE = 12
"""Colours of arms besides grey, c1 to c12 in the style sheet."""
DASHES = 3
"""Styles of line: solid, dashed, dotted."""
WIDTH, LABEL = 100, 11
"""Columns of a finding as text, and of its label."""


@dataclass(frozen=True)
class Link:
    """A text that leads to a page of `composer view`; in a saved report and in a terminal it is the text alone."""

    text: str
    page: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Findings:
    """The decision about a run: what its numbers show, what they do not show, and the reasons in full.

    lead: a sentence below the title. sides: what `shown` and `not_shown` are called. links: where to look next.
    """

    title: str
    lead: str = ""
    shown: Sequence[str] = ()
    not_shown: Sequence[str] = ()
    note: str = ""
    sides: tuple[str, str] = ("shown", "not shown")
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, as shares; `arm` gives the colour."""

    label: str
    arm: str
    estimate: float
    low: float
    high: float
    p_value: float | None = None


@dataclass(frozen=True)
class Intervals:
    """Estimates on one axis with round marks; `difference`: whether they are differences, which may be negative."""

    title: str
    rows: Sequence[Interval]
    note: str = ""
    difference: bool = False

    @property
    def marks(self) -> list[float]:
        """Return the marks of the axis in points; a difference of nothing is not drawn as a large one."""
        ends = [100 * end for row in self.rows for end in (row.low, row.high)]
        if self.difference:
            return ticks(min(*ends, -2.0), max(*ends, 2.0))
        return ticks(max(min(ends), 0.0), min(max(ends), 100.0))


@dataclass(frozen=True)
class Counts:
    """Counts by name as bars, shares of `of`."""

    title: str
    counts: dict[str, int]
    of: int


@dataclass(frozen=True)
class Training:
    """The logged values of a training, by metric."""

    name: str
    arm: str
    seed: str
    losses: str
    status: str
    series: dict[str, Points]


@dataclass(frozen=True)
class Figure:
    """A figure of the probe with the numbers that it was drawn from."""

    run: str
    name: str
    title: str
    csv: str


@dataclass(frozen=True)
class Dialogue:
    """A conversation, folded below its title."""

    title: str
    note: str
    messages: Sequence[ShownMessage]


@dataclass(frozen=True)
class Folded:
    """A long table, folded below its title."""

    table: Table


Block = Findings | Table | Folded | Intervals | Counts | Training | Figure | Dialogue
Blocks = Iterator[Block]


@dataclass(frozen=True)
class Section:
    """The blocks about one run, below the question that they answer."""

    run: str
    title: str
    note: str = ""
    blocks: Sequence[Block] = field(default_factory=list)


def kind(block: Block) -> str:
    """Return the name of a block's class in small letters, by which templates and JSON tell blocks apart."""
    return type(block).__name__.lower()


def as_json(block: Block) -> dict[str, Any]:
    """Return a block as JSON: its kind and its fields, numbers as they are."""
    return {"kind": kind(block), **{declared.name: getattr(block, declared.name) for declared in fields(block)}}


def as_text(findings: Findings) -> str:
    """Return findings as text for a terminal; the reasons in full are in the run's report.txt."""
    lines = [findings.title]
    if findings.lead:
        lines += textwrap.wrap(findings.lead, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for label, sentences in zip(findings.sides, (findings.shown, findings.not_shown), strict=True):
        for sentence in sentences:
            first, indent = f"  {label:<{LABEL}}", " " * (LABEL + 2)
            lines += textwrap.wrap(sentence, WIDTH, initial_indent=first, subsequent_indent=indent)
    return "\n".join(lines)


# Axes and colours.


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Return round numbers that cover an interval, about as many as asked for."""
    # An interval of no width (all rollouts passed) still needs an axis.
    span = max(high - low, 1e-9)
    rough = span / number
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def position(value: float, marks: Sequence[float]) -> float:
    """Return the position of a value between the first and the last mark, in per cent."""
    return round(100 * (value - marks[0]) / max(marks[-1] - marks[0], 1e-9), 2)


def colours(names: Iterable[str]) -> dict[str, int]:
    """Return a number for every arm, by which it is drawn; the untrained start is 0, which is grey."""
    trained = sorted(set(names) - {"start"})
    return {"start": 0, **{name: 1 + number for number, name in enumerate(trained)}}


def hue(number: int) -> str:
    """Return the classes of colour and line of an arm's number; no two of 37 arms share both."""
    colour = 0 if number == 0 else 1 + (number - 1) % PALETTE
    return f"c{colour} d{max(number - 1, 0) // PALETTE % DASHES}"
