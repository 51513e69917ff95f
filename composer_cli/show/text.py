"""Runs, rollouts and answers as text, for `composer show`, `composer status` and `composer query`."""

import shlex
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.cells import cell_len, set_cell_size

from composer_cli.printing import fit_to_terminal
from composer_cli.show.blocks import as_text
from composer_cli.show.facts import display_path, find_rollouts_of_pairs, first_rows, manifest_labels, readable_first
from composer_cli.show.rollout import ShownRollout
from composer_cli.show.runs import DAMAGED, RunLine
from composer_cli.show.sections import findings
from composer_stages.layout import (
    age,
    aligned,
    counted,
    duration,
    escape_control_characters,
    escape_line,
    without_shared_start,
)
from composer_stages.pairs.actions import STUDENT
from composer_stages.runs import queries
from composer_stages.runs.catalog import progress
from composer_stages.runs.display import plain
from composer_stages.runs.kinds import PAIR, STATE, Row
from composer_stages.runs.queries import PairFilter, RolloutFilter, RolloutPage
from composer_stages.runs.run import Run
from composer_stages.terms import grounds_in_words
from composer_stages.words import Sentence

RED, GREEN, YELLOW, BLUE = 31, 32, 33, 34
COLOURS = {
    "complete": GREEN,
    **dict.fromkeys(("running", "queued"), BLUE),
    **dict.fromkeys(("cancelled", "incomplete", "interrupted"), YELLOW),
    **dict.fromkeys(("lost", "failed", "unreadable", "damaged"), RED),
}
"""The colour of each status, by its number in a terminal."""


def status_tables(runs: Sequence[RunLine], jobs: Sequence[dict[str, Any]]) -> str:
    """Return runs and submitted jobs as a table each, where there are any: words to the left, numbers to the right."""
    cells = [
        (
            escape_line(line.run),
            line.status,
            age(line.age_s) if line.began else "",
            f"{line.done}/{line.planned}" if line.planned else "",
            f"{line.cost_usd:.2f}" if line.began else "",
            duration(line.seconds) if line.seconds else "",
            escape_line(line.device),
            escape_line(line.reason),
        )
        for line in runs
    ]
    sides = ("left", "left", "right", "right", "right", "right", "left", "left")
    titles = ("run", "status", "age", "units", "USD", "took", "device", "reason")
    tables = [aligned(cells, titles, sides)] if runs else []
    if jobs:
        rows = [(job["job"], job["on"], job["status"], age(job["age_s"]), escape_line(job["reason"])) for job in jobs]
        tables.append(aligned(rows, ("job", "on", "status", "age", "reason")))
    return "\n\n".join(tables)


def query_table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the answer to a query as a table; columns of numbers to the right."""
    cells = [
        ["-" if v is None else escape_line(f"{v:.6g}" if isinstance(v, float) else str(v)) for v in row] for row in rows
    ]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    return aligned(cells, columns, ["right" if number else "left" for number in numeric] if rows else None)


SHORT = ("status", "began", "models", "reads")
"""The facts of a run that begin the list of its rollouts."""


def facts_page(
    run: Run, labels: Collection[str] | None = None, done: int | None = None, *, damaged: bool = False
) -> str:
    """Return the facts of a run's manifest as text, all or those with these labels, and how far it is.

    done: the units that are finished, where that is known already. damaged: whether its files are not those written.
    """
    facts = {label: words for label, words in manifest_labels(run).items() if labels is None or label in labels}
    facts["status"] += f", but {DAMAGED}" if damaged else ""
    if far := progress(run, done):
        facts["status"] += f": {far}"
    if "in progress" in facts["status"]:
        facts["status"] += "; --follow watches it"
    if labels is not None and (run.path / "report.txt").exists():
        facts["report"] = str(display_path(run.path / "report.txt"))
    return "\n".join([str(display_path(run.path)), *(f"  {label:<8}{words}" for label, words in facts.items())])


def run_page(run: Run, listed: str, page: RolloutPage | None = None) -> str:
    """Return a run as text: its path, its decision, its facts, its report, then what is listed of it.

    page: any page of a run with rollouts, of which the most important facts and the first paragraph of its report are
    enough.
    """
    decision, report = findings(run), (run.read_file("report.txt") or b"").decode(errors="replace").strip()
    facts = facts_page(run) if page is None else facts_page(run, SHORT, sum(page.outcomes.values()))
    if page is not None:
        report = report.partition("\n\n")[0]
        if (grounds := grounds_in_words(page.passes)) and grounds not in report:
            listed = f"{grounds}\n{listed}"
    if decision is not None:
        path, _, facts = facts.partition("\n")
        facts = f"{path}\n{as_text(decision)}\n\n{facts}"
    return "\n\n".join(filter(None, [facts, fit_to_terminal(report), listed]))


def rows_text(run: Run, number: int) -> str:
    """Return the first rows of the tables of a run without rollouts; pairs each with the end of its state."""
    tables = first_rows(run, number)
    if str(PAIR) in tables:
        tables.pop(str(STATE), None)  # the first states are not those of the first pairs
        tables.pop(str(PAIR))
    num_rows = {out["kind"].partition("/")[0]: out["rows"] for out in run.manifest.outputs.values()}
    texts = [
        f"{kind}, row {number:,} of {num_rows[kind.partition('/')[0]]:,}\n{_row(row)}"
        for kind, rows in tables.items()
        for number, row in enumerate(rows, start=1)
    ]
    return "\n\n".join([*pairs_text(run, number), *texts])


def pairs_text(run: Run, number: int) -> list[str]:
    """Return the first pairs of a run as texts: the end of the state, both actions, the votes, the rollout's reward."""
    page = queries.pairs(run, PairFilter(), size=number)
    if page is None:
        return []
    states = queries.state_messages(run, page.rows) if page.rows else {}
    outcomes = find_rollouts_of_pairs(run.path.resolve().parent.parent, run, page.rows)
    texts = []
    for row_number, row in enumerate(page.rows, start=1):
        outcome, _ = outcomes.get(row["rollout_id"], ({"reward": None, "outcome": ""}, ""))
        # Of a pair over the student; over a teacher, the rollout is that of the chosen action.
        side = "rejected" if row["rejected_by"] == STUDENT else "chosen"
        lines = [
            f"pair {row_number} of {page.total:,}: {row['pair_id']}",
            f"  state   step {row['step'] + 1} of {row['rollout_id']}" if row["step"] is not None else "",
            f"  rule    {row['rule']}{_votes(row)}",
            ""
            if outcome["reward"] is None
            else f"  reward  {outcome['reward']:.3g} ({outcome['outcome']}) of the rollout with the {side} action",
        ]
        blocks = {}
        if state := states.get(row["pair_id"]):
            blocks[f"state, the last of {len(state)} messages, {state[-1]['role']}"] = state[-1]["content"]
        by = row["chosen_by"] or ()
        blocks["chosen" + (f", by {', '.join(by)}" if len(by) else "")] = row["chosen"]
        blocks["rejected" + (f", by {row['rejected_by']}" if row["rejected_by"] else "")] = row["rejected"]
        texts.append("\n\n".join(["\n".join(filter(None, lines)), *(f"{t}\n{indented(c)}" for t, c in blocks.items())]))
    if (more := page.total - len(page.rows)) > 0:
        texts.append(f"and {more:,} more pairs: -n {page.total}")
    return texts


def _votes(row: Row) -> str:
    if row["votes_chosen"] is None:
        return ""
    against = "" if row["votes_rejected"] is None else f" to {row['votes_rejected']:g}"
    return f", {row['votes_chosen']:g}{against} votes of {row['num_teachers']} teachers"


def _row(row: Row) -> str:
    """Return short values on one line each, long ones as a block, the last message of conversations; no token lists."""
    lines = []
    for column in readable_first(row):
        value = row[column]
        if value is None or (isinstance(value, list) and value and isinstance(value[0], (int, float))):
            continue
        if column.endswith("messages_json") and (messages := orjson.loads(value)):
            lines.append(f"{column} (the last)\n{indented(messages[-1]['content'])}")
            continue
        text = duration(value) if column.endswith("_s") else plain(value)
        lines.append(f"{column}\n{indented(text)}" if "\n" in text or len(text) > 90 else f"{column:<18}{text}")
    return "\n".join(lines)


def indented(content: str) -> str:
    """Return the lines of a text behind four spaces, so that none looks like a title."""
    return "\n".join(f"    {line}" for line in escape_control_characters(content).removesuffix("\n").split("\n"))


# Rollouts.

NUMBER = 20
"""Rollouts that are listed where no number is asked for."""
WIDTH = 120
"""Width of the index where stdout is no terminal."""
LEAST_PROMPT = 12
"""Width below which prompts are left out."""
OUTCOME_COLOURS = {"passed": GREEN, "failed": RED, "hacked": RED, "error": RED, "FAIL": RED}
"""The colours of outcomes and of collection checks."""
HEAD, TAIL = 20, 10
"""Lines of a long text that are printed of its beginning and its end."""
LONGEST_LINE = 1_000
"""Characters of a line that are printed."""


def index_text(page: RolloutPage, rollout_filter: RolloutFilter, called: str) -> str:
    """Return an index as text, as wide as the terminal. `called`: the run as the user called it."""
    num_rollouts = sum(page.outcomes.values())
    each = ", ".join(f"{number:,} {outcome}" for outcome, number in page.outcomes.items())
    title = f"{counted(num_rollouts, 'rollout')}{f': {each}' if each else ''}"
    if rollout_filter.reward:
        title += f"; only those that {rollout_filter.reward}" if page.rows else f"; none {rollout_filter.reward}"
    lines = [title]
    if page.rows:
        lines += ["", _table(page.rows)]
        if (more := page.total - len(page.rows)) > 0:
            lines.append(f"and {more:,} more: -n {page.total}")
        words = [shlex.quote(escape_line(word)) for word in (called, page.rows[0]["short"])]
        lines += ["", fit_to_terminal(Sentence("cli.rollout-shown-by", run=words[0], rollout=words[1]))]
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> str:
    """Return rollouts as a table. Columns without a value are left out; prompts get what is left of the width."""
    columns = [
        ("rollout", "left", [row["short"] for row in rows]),
        ("arm", "left", [row["arm"] for row in rows]),
        # The ids of rollouts that were collected hold the task, the sample and the seed; those of imported ones do not.
        ("task", "left", ["" if (row["task_id"] or "") in row["id"] else row["task_id"] for row in rows]),
        # An item of an evaluation has passed or failed, and no other reward.
        ("reward", "right", ["" if row["arm"] or row["reward"] is None else f"{row['reward']:.3g}" for row in rows]),
        ("outcome", "left", [row["outcome"] for row in rows]),
        ("steps", "right", [row["num_steps"] for row in rows]),
        ("ended by", "left", [row["terminated_by"] for row in rows]),
    ]
    filled = [
        (title, side, ["" if value is None else escape_line(str(value)) for value in values])
        for title, side, values in columns
        if any(value not in (None, "") for value in values)
    ]
    room = shutil.get_terminal_size((WIDTH, 0)).columns
    room -= sum(max(map(cell_len, (title, *cells))) + 2 for title, _, cells in filled)
    prompts = [escape_control_characters(" ".join((row["prompt"] or "").split())) for row in rows]
    previews = without_shared_start(prompts)
    if room >= LEAST_PROMPT and any(previews):
        filled.append(("prompt", "left", [_cut(text, room) for text in previews]))
    cells = zip(*(values for _, _, values in filled), strict=True)
    return aligned(cells, [title for title, _, _ in filled], [side for _, side, _ in filled])


def transcript_text(folder: Path, rollout: ShownRollout, *, full: bool) -> str:
    """Return a rollout as text: its outcome, the conversation, what was submitted, and how it was graded.

    folder: that of its run. full: whether long texts are written as they are.
    """

    def section(title: str, content: str) -> str:
        return f"{escape_line(title)}\n{indented(content if full else _shortened(content))}"

    facts = [f"  {label:<9} {escape_line(text)}" for label, text in rollout.opening(folder).items()]
    grades = [f"  {escape_line(name):<25} {escape_line(text)}" for name, text in rollout.grading().items()]
    parts = [
        "\n".join([escape_line(rollout.title), *facts]),
        *(section(*part) for part in rollout.blocks()),
        "\n".join(["grading", *(grades or ["  not graded"])]),
        *(section(*part) for part in rollout.logs()),
    ]
    return "\n\n".join(parts)


HEIGHT = 40
"""Lines of a screen where stdout is no terminal."""
FIRST = 3
"""Lines of a message on a screen."""


def screen_text(folder: Path, rollout: ShownRollout) -> str:
    """Return a rollout as text that fits a screen: its outcome, its grades, how its conversation begins and ends."""
    width, height = shutil.get_terminal_size((WIDTH, HEIGHT))
    logs = {title: log.strip().rpartition("\n")[2] for title, log in rollout.logs()}
    facts = {**rollout.opening(folder), **rollout.grading(), **logs}
    head = [rollout.title, *(f"  {label:<25} {fact}" for label, fact in facts.items())]
    blocks = [[title, *_beginning(content)] for title, content in rollout.blocks()]
    # Of the beginning what the system and the user said, where there is room; below come a sentence and a prompt.
    for opening in (2, 1, 0):
        room = height - 3 - sum(len(block) + 1 for block in (head, *blocks[:opening]))
        if room > FIRST + 2:
            break
    end = list[list[str]]()
    for block in reversed(blocks[opening:]):
        room -= len(block) + 1
        if room < 0 and end:
            break
        end.insert(0, block)
    left_out = len(blocks) - opening - len(end)
    note: list[list[str]] = [[Sentence("cli.messages-left-out", count=left_out)]] if left_out > 0 else []
    parts = (head, *blocks[:opening], *note, *end)
    return "\n\n".join("\n".join(_cut(escape_line(line), width) for line in part) for part in parts)


def _beginning(content: str) -> list[str]:
    """Return the first lines of a text that hold something, and how many follow."""
    lines = [f"    {line}" for line in content.split("\n") if line.strip()]
    more = len(lines) - FIRST
    return lines if more <= 1 else [*lines[:FIRST], f"    \u2026 {more:,} more lines"]


def _cut(line: str, width: int) -> str:
    """Return a line that is no wider than this."""
    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 1).rstrip()}\u2026"


def _shortened(content: str) -> str:
    """Return the beginning and the end of a long text, and of its long lines the beginnings, with what was left out."""
    lines = [
        line
        if len(line) <= LONGEST_LINE
        else f"{line[:LONGEST_LINE]} ({len(line) - LONGEST_LINE:,} more characters, --full prints them)"
        for line in content.split("\n")
    ]
    if (left_out := len(lines) - HEAD - TAIL) > 1:
        lines[HEAD:-TAIL] = [f"... {left_out:,} lines left out here, --full prints them ..."]
    return "\n".join(lines)
