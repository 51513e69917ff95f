"""The table of a training's course in report.txt: steps by columns, the channels' columns from the registry."""

from collections.abc import Iterator, Sequence

from stages.runs.records import Row
from stages.training.channels import CHANNELS

GRPO_COLUMNS = {"reward": "reward", "reward_std": "std", "loss": "loss", "grad_norm": "|grad|", "entropy": "entropy"}
"""Metric -> title."""


def training_table(arm: str, history: Sequence[Row], rows: int = 12) -> str:
    """At most `rows` + 1 steps, evenly spaced, the last among them; only columns that were logged.

    history: what TRL logged, one object of metrics a step.
    """
    columns = [(metric, title) for metric, title in _columns() if any(metric in row for row in history)]
    stride, last = max(len(history) / rows, 1.0), len(history) - 1
    picked = sorted({min(int(i * stride), last) for i in range(rows)} | {last}) if history else []
    widths = [max(10, len(title) + 1) for _, title in columns]
    header = "".join(f"{title:>{width}}" for (_, title), width in zip(columns, widths, strict=True))
    lines = [f"arm {arm}", f"{'step':>6}{header}"]
    for index in picked:
        row = history[index]
        cells = (_cell(row.get(metric), width) for (metric, _), width in zip(columns, widths, strict=True))
        lines.append(f"{row.get('step', index + 1):>6}" + "".join(cells))
    return "\n".join(lines) + "\n"


def _columns() -> Iterator[tuple[str, str]]:
    yield from GRPO_COLUMNS.items()
    for name, channel in CHANNELS.items():
        yield f"{name}/loss", name
        yield from ((f"{name}/{metric}", title) for metric, title in channel.columns.items())


def _cell(value: object, width: int) -> str:
    return f"{value:>{width}.4f}" if isinstance(value, (int, float)) else f"{'-':>{width}}"
