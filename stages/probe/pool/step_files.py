"""`step_NNN.jsonl.gz` and `step_NNN.diag.json`: the rows of one step, and what was measured on the step as a whole."""

import math
from typing import SupportsFloat

from stages.runs import store
from stages.runs.artifact import Out
from stages.runs.records import Row


def write_step(out: Out, step: int, rows: list[Row], diagnostics: Row | None, folder: str = ".") -> None:
    """Write a step's files below `folder` of the output; diagnostics only when there are any."""
    store.seal_lines(out.path / folder / f"step_{step:03d}.jsonl.gz", [store.encode(row) for row in rows])
    if diagnostics is not None:
        out.document(f"{folder}/step_{step:03d}.diag", diagnostics)


def read_step(out: Out, step: int) -> list[Row]:
    """The rows that `write_step` wrote."""
    return list(store.read_lines(out.path / f"step_{step:03d}.jsonl.gz"))


def finite_or_none(value: SupportsFloat) -> float | None:
    """The value as a float where it is finite, else None: undefined numbers are null in records, never NaN."""
    number = float(value)
    return number if math.isfinite(number) else None
