"""Short tables of runs, plans and tables on disk, as text in a terminal and as HTML in a notebook."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from composer_stages import layout
from composer_stages.layout import LEFT, RIGHT, aligned, duration
from composer_stages.runs.kinds import KINDS

if TYPE_CHECKING:
    import pandas

    from composer_stages.runs.run import Run
    from composer_stages.runs.stage import Plan
    from composer_stages.runs.tables import Scan

SHOWN_ROWS = 10
SHOWN_CHARACTERS = 60
SHOWN_COLUMNS = 8


def plain(value: Any) -> str:
    """Return a value for people: yes and no, numbers without trailing zeros, a dash for what is not known."""
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        return ", ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """Return a share in per cent; a dash for one that was not measured."""
    return "\u2013" if share is None else f"{100 * share:.1f} %"


def points(share: float) -> str:
    """Return a difference of shares in points, with the minus sign of typography."""
    return layout.signed(share).replace("-", "\u2212")


Unit = Literal[
    "", "percent", "percents", "points", "gain", "interval", "size", "p", "short", "count", "number", "usd", "duration"
]
FORMATS: dict[str, Callable[[Any], str]] = {
    "percent": percent,
    "percents": lambda ends: f"{percent(ends[0])} to {percent(ends[1])}",
    "points": points,
    "gain": points,  # in the colour of its sign on a page
    "interval": lambda ends: f"{points(ends[0])} to {points(ends[1])}",
    "size": lambda share: f"{100 * share:.1f}",  # a share in points, without a sign
    "p": lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}",
    "short": lambda number: f"{number:z,.4g}".replace("-", "\u2212"),
    "count": lambda number: f"{number:,.0f}",
    "number": plain,
    "usd": lambda number: f"{number:.4f}",
    "duration": duration,
}
"""Formats of cells by name, all of numbers, which stand to the right."""


def cell(value: Any, form: str = "") -> str:
    """Return a cell as text; `form`: a key of FORMATS, or empty for text."""
    if value is None or value == (None, None):
        return plain(None)
    return FORMATS[form](value) if form else plain(value)


@dataclass(frozen=True)
class Column:
    """A column of a table of records: its title, how a record is read, and the format of its cells."""

    title: str
    value: str | tuple[str, str] | Callable[[Any], Any] = ""
    """The key of the value, or of both values of a pair, or a function of the record; the title where it is empty."""
    unit: Unit = ""
    """A key of FORMATS; empty for text."""

    def read(self, record: Mapping[str, Any]) -> Any:
        """Return the value of a record in this column; None where the record lacks the key."""
        if isinstance(self.value, tuple):
            return tuple(map(record.get, self.value))
        return self.value(record) if callable(self.value) else record.get(self.value or self.title)


@dataclass(frozen=True, repr=False)
class Table(Sequence[dict[str, Any]]):
    """Rows by column, a sequence of dictionaries; it shows the first of them.

    >>> table = composer.query("select task_id, reward from rollouts", composer.find("collect"))
    >>> len(table), table[0]["reward"], table.pandas().shape
    (2, 1.0, (2, 2))
    """

    columns: Sequence[str]
    """The names of the columns."""
    cells: Sequence[Sequence[Any]]
    """The values, row by row."""
    title: str = ""
    """A line above the rows."""
    total: int | None = None
    """Rows in all, where `cells` holds only the first."""
    note: str = ""
    """A sentence below the rows."""
    shown: int = SHOWN_ROWS
    """How many rows it shows."""
    formats: Sequence[str] = ()
    """For each column a key of FORMATS, or empty for text; none at all where every column is text."""

    @classmethod
    def of(cls, title: str, records: Iterable[Mapping[str, Any]], *columns: Column, note: str = "") -> "Table":
        """Return a table with a row for each record."""
        cells = [[column.read(record) for column in columns] for record in records]
        titles, formats = [column.title for column in columns], [column.unit for column in columns]
        return cls(titles, cells, title=title, note=note, formats=formats)

    def __len__(self) -> int:
        return len(self.cells)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a row as a dictionary, or with a slice a list of them."""
        if isinstance(index, slice):
            return [dict(zip(self.columns, cells, strict=True)) for cells in self.cells[index]]
        return dict(zip(self.columns, self.cells[index], strict=True))

    def pandas(self) -> "pandas.DataFrame":
        """Return all rows as a pandas frame."""
        import pandas

        return pandas.DataFrame([tuple(row) for row in self.cells], columns=list(self.columns))

    @property
    def forms(self) -> list[str]:
        """Return the format of each column."""
        return [*self.formats] or [""] * len(self.columns)

    @property
    def measured(self) -> list[int]:
        """Return the places of the columns in which some row has a value."""
        return [at for at in range(len(self.columns)) if any(row[at] not in (None, (None, None)) for row in self.cells)]

    def __repr__(self) -> str:
        sides = [RIGHT if form else LEFT for form in self.forms]
        table = aligned(self._shown(), list(self.columns), sides)
        return "\n".join(filter(None, [self.title, table, self._rest(), self.note]))

    def _repr_html_(self) -> str:
        """Return the table for a notebook, with everything that models wrote escaped."""

        def row(tag: str, texts: Sequence[str]) -> str:
            sides = (' style="text-align: right"' if form else "" for form in self.forms)
            cells = (f"<{tag}{side}>{escape(text)}</{tag}>" for text, side in zip(texts, sides, strict=True))
            return f"<tr>{''.join(cells)}</tr>"

        head, body = row("th", self.columns), "".join(row("td", texts) for texts in self._shown())
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        parts = [f"<p>{escape(text)}</p>" if text else "" for text in (self.title, self._rest(), self.note)]
        return f"{parts[0]}{table}{''.join(parts[1:])}"

    def _shown(self) -> list[list[str]]:
        return [
            [cell(value, form) if form else shortened(value) for value, form in zip(row, self.forms, strict=True)]
            for row in self.cells[: self.shown]
        ]

    def _rest(self) -> str:
        more = (len(self.cells) if self.total is None else self.total) - min(len(self.cells), self.shown)
        return f"and {more:,} rows more" if more > 0 else ""


def shortened(value: Any) -> str:
    """Return a value on one short line; a path is not cut."""
    most = len(str(value)) if isinstance(value, Path) else SHOWN_CHARACTERS
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    # Characters that steer a terminal, or the direction of writing, are spelt out: models may have written them.
    return layout.shortened(
        "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[: most + 1]), most
    )


def of_run(run: "Run") -> Table:
    """Return the facts of a run: its stage, status, counts and tables."""
    record = run.manifest
    facts: dict[str, Any] = {"stage": record.stage, "status": record.status, "folder": run.path}
    facts |= {name: number for name, number in record.counts.items() if number}
    facts |= {name: value for name, value in record.summary.items() if isinstance(value, (str, int, float))}
    facts |= {"cost_usd": record.cost_usd} if record.cost_usd else {}
    facts["tables"] = ", ".join(f"{name} ({out['rows']:,})" for name, out in record.outputs.items())
    return Table(("run", f"{run.path.parent.name}/{run.path.name}"), [*facts.items()])


def of_scan(scan: "Scan") -> Table:
    """Return the first rows of a table on disk, with the columns that matter most, and how to see the others."""
    names = scan.columns
    main = [name for name in (KINDS[scan.kind].main if scan.kind in KINDS else ()) if name in names]
    columns = (main or names)[:SHOWN_COLUMNS]
    batch = next(scan.batches(columns, size=SHOWN_ROWS), None)
    rows = [] if batch is None else batch.to_pylist()
    hidden = len(names) - len(columns)
    note = f"and {hidden} columns more: .columns names them, .pandas() and .arrow() read them" if hidden else ""
    return Table(columns, [[row[name] for name in columns] for row in rows], total=len(scan), note=note)


def of_plan(plan: "Plan") -> Table:
    """Return a plan's bounds."""
    facts: dict[str, Any] = {plan.what: f"up to {plan.units:,}" if plan.up_to else f"{plan.units:,}"}
    if plan.max_completion_tokens:
        facts["sampled tokens, at most"] = f"{plan.max_completion_tokens:,}"
    if plan.max_cost_usd:
        facts["USD, at most"] = f"{plan.max_cost_usd:,.2f}" if plan.max_cost_usd >= 0.01 else "less than 0.01"
    return Table(("plan", ""), [*facts.items(), *(("", note) for note in plan.notes)])
