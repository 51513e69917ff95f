"""`composer query`: questions in SQL about the tables of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_cli.show import runs
from composer_cli.visible import visible_line
from stages.errors import BadInput
from stages.runs import manifest
from stages.runs.artifact import Run


def readable(root: Path, named: Sequence[str]) -> list[Run]:
    """The runs to ask about: those that were named, or all whose manifest can be read."""
    if named:
        return [Run(runs.find(root, text)) for text in named]
    return [Run(folder) for folder in runs.folders(root) if _can_be_read(folder)]


def _can_be_read(folder: Path) -> bool:
    try:
        manifest.read(folder)
    except BadInput:
        return False
    return True


def table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """An answer as aligned text; numbers to the right."""
    from tabulate import tabulate

    texts = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    sides = ["right" if number else "left" for number in numeric]
    shown = tabulate(texts, columns, tablefmt="plain", colalign=sides if rows else None, disable_numparse=True)
    return "\n".join(line.rstrip() for line in shown.splitlines())


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return visible_line(text)
