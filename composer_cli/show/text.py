"""Facts about runs as text: the page of `composer show`, the tables of `composer status` and `composer query`."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from composer_cli.printing import age, aligned, duration, visible, visible_line
from composer_cli.show.facts import Transcript, described, first_rows
from composer_cli.show.runs import RunLine
from stages.runs.artifact import Run
from stages.runs.records import Row

RED, GREEN, YELLOW, BLUE = 31, 32, 33, 34
COLOURS = {
    "complete": GREEN,
    "running": BLUE,
    "queued": BLUE,
    "cancelled": YELLOW,
    "lost": RED,
    "incomplete": YELLOW,
    "interrupted": YELLOW,
    "failed": RED,
    "unreadable": RED,
}
"""The colour of each status, by its number in a terminal."""


def runs_table(found: Iterable[RunLine]) -> str:
    """Return a list of runs as a table: words to the left, numbers to the right."""
    cells = [
        (
            visible_line(line.run),
            line.status,
            age(line.age_s) if line.began else "",
            f"{line.done}/{line.planned}" if line.planned else "",
            f"{line.cost_usd:.2f}" if line.began else "",
            duration(line.seconds) if line.seconds else "",
            visible_line(line.reason),
        )
        for line in found
    ]
    sides = ("left", "left", "right", "right", "right", "right", "left")
    return aligned(cells, ("run", "status", "age", "units", "USD", "took", "reason"), sides)


def jobs_table(found: Iterable[dict[str, Any]]) -> str:
    """Return submitted jobs as a table."""
    cells = [(job["job"], job["on"], job["status"], age(job["age_s"]), visible_line(job["reason"])) for job in found]
    return aligned(cells, ("job", "on", "status", "age", "reason"))


def query_table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the answer to a query as a table; columns of numbers to the right."""
    cells = [
        ["-" if v is None else visible_line(f"{v:.6g}" if isinstance(v, float) else str(v)) for v in row]
        for row in rows
    ]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    return aligned(cells, columns, ["right" if number else "left" for number in numeric] if rows else None)


def run_page(run: Run, transcripts: Iterable[Transcript], number: int) -> str:
    """Return a run as text: facts, result, then these transcripts, or the first rows of its tables without any."""
    facts = "\n".join([str(run.path), *(f"  {label:<8}{words}" for label, words in described(run).items())])
    result = (run.read_file("report.txt") or b"").decode().strip()
    shown = [_transcript(transcript) for transcript in transcripts]
    if not shown:
        shown = [f"{kind}\n{_row(row)}" for kind, rows in first_rows(run, number).items() for row in rows]
    return "\n\n".join(part for part in [facts, result, *shown] if part)


def _transcript(transcript: Transcript) -> str:
    """Return a line about the outcome, then role and content of each message."""
    outcome = ", ".join(f"{name} {_plain(value)}" for name, value in transcript.outcome.items())
    messages = [f"\n{message['role']}\n{_indented(message['content'])}" for message in transcript.messages]
    return "\n".join([f"{transcript.rollout_id}: {outcome}", *messages])


def _row(row: Row) -> str:
    """Return short values on one line each, long ones as a block, the last message of conversations; no token lists."""
    lines = []
    for name, value in row.items():
        if value is None or (isinstance(value, list) and value and isinstance(value[0], (int, float))):
            continue
        if name.endswith("messages_json") and (messages := orjson.loads(value)):
            lines.append(f"{name} (the last)\n{_indented(messages[-1]['content'])}")
            continue
        text = _plain(value)
        lines.append(f"{name}\n{_indented(text)}" if "\n" in text or len(text) > 90 else f"{name:<18}{text}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _indented(content: str) -> str:
    return "\n".join(f"    {line}" for line in visible(content).removesuffix("\n").split("\n"))
