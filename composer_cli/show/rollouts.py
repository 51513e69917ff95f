"""The rollouts of a run in the terminal: an index of them, and one rollout as a transcript; as values and as text.

`composer show RUN` prints the index, `composer show RUN ROLLOUT` the transcript. Only what is printed is read.
"""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

import orjson
from rich.cells import cell_len, set_cell_size

from composer_cli.printing import aligned, visible, visible_line
from composer_cli.show.facts import GREEN, NAMES, RED, indented, plain, shown_path
from stages.errors import BadInput
from stages.messages import Message
from stages.plurals import counted
from stages.rollouts.agent_loop import SUMMARY_REQUEST
from stages.rollouts.trace import item_steps
from stages.runs import queries
from stages.runs.kinds import Row
from stages.runs.queries import RolloutFilter, RolloutPage
from stages.runs.run import Run

NUMBER = 20
"""Rollouts that are listed where no number is asked for."""
CANDIDATES = 10
"""Rollouts that are named where a part of an id fits several."""
COLUMNS = ("id", "short", "arm", "task_id", "sample_idx", "reward", "outcome", "num_steps", "terminated_by", "prompt")
"""Columns of the index."""
WIDTH = 120
"""Width of the index where stdout is no terminal."""
LEAST_PROMPT = 12
"""Width below which prompts are left out."""
LEAST_SHARED = 24
"""Characters from which the beginning that all prompts share is left out."""
COLOURS = {"passed": GREEN, "failed": RED, "hacked": RED, "error": RED, "FAIL": RED}
"""The colours of outcomes and of checks of the gate."""
HEAD, TAIL = 20, 10
"""Lines of a long text that are printed of its beginning and its end."""
LONGEST_LINE = 1_000
"""Characters of a line that are printed."""
VERDICTS = ("reward", "passed", "gt_pass", "visible_pass", "hacked", "protocol_ok")
"""Columns that say how a rollout was graded, in this order."""


# The index.


def index(run: Run, wanted: RolloutFilter, number: int) -> RolloutPage | None:
    """Return the first `number` rollouts that fit, with the columns of the index; None for a run without rollouts."""
    found = queries.page(run, wanted, size=number)
    if found is None:
        return None
    return RolloutPage(
        found.total, found.offset, [{name: row[name] for name in COLUMNS} for row in found.rows], found.outcomes
    )


def index_text(found: RolloutPage, wanted: RolloutFilter, called: str) -> str:
    """Return an index as text, as wide as the terminal. `called`: the run as the user called it."""
    every = sum(found.outcomes.values())
    each = ", ".join(f"{number:,} {outcome}" for outcome, number in found.outcomes.items())
    title = f"{counted(every, 'rollout')}{f': {each}' if each else ''}"
    if wanted.reward:
        title += f"; only those that {wanted.reward}" if found.rows else f"; none {wanted.reward}"
    lines = [title]
    if found.rows:
        lines += ["", _table(found.rows)]
        if (more := found.total - len(found.rows)) > 0:
            lines.append(f"and {more:,} more: -n {found.total}")
        lines += [
            "",
            f"composer show {visible_line(called)} {shlex.quote(visible_line(found.rows[0]['short']))} prints the "
            "first; any part of an id will do that no other id has.",
        ]
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
    shown = [
        (title, side, ["" if value is None else visible_line(str(value)) for value in values])
        for title, side, values in columns
        if any(value not in (None, "") for value in values)
    ]
    room = shutil.get_terminal_size((WIDTH, 0)).columns
    room -= sum(max(map(cell_len, (title, *cells))) + 2 for title, _, cells in shown)
    previews = _previews([row["prompt"] or "" for row in rows])
    if room >= LEAST_PROMPT and any(previews):
        cut = [one if cell_len(one) <= room else f"{set_cell_size(one, room - 1).rstrip()}\u2026" for one in previews]
        shown.append(("prompt", "left", cut))
    cells = zip(*(values for _, _, values in shown), strict=True)
    return aligned(cells, [title for title, _, _ in shown], [side for _, side, _ in shown])


def _previews(prompts: Sequence[str]) -> list[str]:
    """Return prompts on one line each, without a long beginning that all tasks share."""
    lines = [visible(" ".join(prompt.split())) for prompt in prompts]
    different = set(filter(None, lines))
    if len(different) < 2:
        return lines
    # What the first and the last in alphabetical order share, all others share.
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(min(different), max(different), strict=False))
    shared = "".join(character for character, _ in alike).rpartition(" ")[0]
    if len(shared) < LEAST_SHARED:
        return lines
    return [line and f"\u2026{line[len(shared) :]}" for line in lines]


# One rollout.


@dataclass(frozen=True)
class SaidMessage:
    """A message of a rollout; `step`: of an action and of what was observed after it, from 1; `notes`: what was cut."""

    role: str
    content: str
    step: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return who said it, at which step, and what was cut."""
        who = "observation" if self.step is not None and self.role != "assistant" else self.role
        at = "" if self.step is None else f", step {self.step}"
        return " \u00b7 ".join([f"{who}{at}", *self.notes])


@dataclass(frozen=True)
class RolloutTranscript:
    """One rollout: its row with its `outcome`, and the conversation without the patch that ended it."""

    rollout: Row
    messages: list[SaidMessage]


def transcript(run: Run, wanted: str) -> RolloutTranscript:
    """Return the rollout with this id, or part of an id; `BadInput` unless exactly one fits."""
    fitting = queries.rollout_ids(run, wanted)
    if len(fitting) > 1:
        some = ", ".join(queries.short_ids(run, fitting[:CANDIDATES]))
        more = f" and {len(fitting) - CANDIDATES:,} more" if len(fitting) > CANDIDATES else ""
        raise BadInput(f"{len(fitting):,} rollouts fit {wanted!r}: {some}{more}. Give one of these, or more of the id.")
    if not fitting:
        ids = queries.rollout_ids(run)
        if not ids:
            raise BadInput(f"{run.path} holds no rollouts. `composer show {run.path}` shows what it holds.")
        near = get_close_matches(wanted, ids, n=1) or ids[:1]
        raise BadInput(f"{run.path} has no rollout {wanted!r}; it has {len(ids)}, for example {near[0]}.")
    row, steps = queries.rollout(run, fitting[0])
    assert row is not None  # noqa: S101 (its id was just found)
    return as_transcript(row, steps)


def as_transcript(row: Row, steps: Sequence[Row]) -> RolloutTranscript:
    """Return a rollout or an item as a transcript, from its row with its `outcome` and its steps, if there are any."""
    held = {name: value for name, value in row.items() if name not in ("transcript_json", "steps_json", "file_row")}
    return RolloutTranscript(held, said(row, steps))


def said(row: Row, steps: Sequence[Row]) -> list[SaidMessage]:
    """Return the messages of a rollout, or of an item of an evaluation, of which `steps` may be empty."""
    if steps := steps or item_steps(row):
        return list(_of_steps(steps, row.get("submission")))
    messages: list[Message] = orjson.loads(row.get("transcript_json") or "[]")
    return [SaidMessage(message["role"], message["content"]) for message in messages]


def _of_steps(steps: Sequence[Row], submission: str | None) -> Iterator[SaidMessage]:
    """Yield the messages of a rollout from its steps; of the last observation not the submitted patch."""
    before: Row | None = None
    for number, step in enumerate(steps, start=1):
        gained: list[Message] = orjson.loads(step["new_messages_json"])
        if before is not None and gained[:1] == [{"role": "assistant", "content": before["action"]}]:
            gained = gained[1:]
        notes = _observation_notes(before) if before is not None else []
        for message in gained:
            observed = before is not None and message["role"] in ("user", "tool") and message != SUMMARY_REQUEST
            yield SaidMessage(
                message["role"], message["content"], number - 1 if observed else None, notes if observed else []
            )
            notes = [] if observed else notes
        yield SaidMessage("assistant", step["action"], number, _action_notes(step))
        before = step
    last = steps[-1]
    if last["observation"] and last["observation"] != submission:
        yield SaidMessage("user", last["observation"], len(steps), _observation_notes(last))


def _action_notes(step: Row) -> list[str]:
    """Return what a reader has to know about an action."""
    notes = []
    if step["truncated"]:
        limit = orjson.loads(step["sampling_json"] or "{}").get("max_tokens")
        notes.append(f"cut off at max_tokens{f' = {limit}' if limit else ''}")
    return [*notes, *([f"not well-formed: {step['parse_error']}"] if step["parse_error"] else [])]


def _observation_notes(step: Row) -> list[str]:
    """Return what a reader has to know about an observation, as far as the observation itself does not tell it."""
    notes = []
    if step["elided_chars"]:
        of = f" of {step['raw_chars']:,}" if step["raw_chars"] else ""
        notes.append(f"cut by the environment: {step['elided_chars']:,}{of} characters left out")
    if step["timed_out"]:
        notes.append("timed out")
    if step["returncode"] is not None and f"[exit {step['returncode']}" not in (step["observation"] or ""):
        notes.append(f"exit code {step['returncode']}")
    return notes


def transcript_text(folder: Path, one: RolloutTranscript, *, full: bool) -> str:
    """Return a rollout as text: its outcome, the conversation, what was submitted, and how it was graded.

    folder: that of its run. full: whether long texts are written as they are.
    """
    row = one.rollout

    def section(title: str, content: str) -> str:
        return f"{visible_line(title)}\n{indented(content if full else _shortened(content))}"

    facts = [f"  {label:<9} {visible_line(text)}" for label, text in opening(folder, row).items()]
    grades = [f"  {visible_line(name):<25} {visible_line(text)}" for name, text in grading(row).items()]
    parts = [
        "\n".join([visible_line(title(row)), *facts]),
        *(section(*part) for part in blocks(one)),
        "\n".join(["grading", *(grades or ["  not graded"])]),
        *(section(*part) for part in logs(row)),
    ]
    return "\n\n".join(parts)


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


def title(row: Row) -> str:
    """Return the id of a rollout with its outcome and its reward."""
    reward = row.get("reward")
    return f"{row.get('rollout_id') or row['item_id']}: {row['outcome']}" + (
        "" if reward is None else f", reward {reward:g}"
    )


def opening(folder: Path, row: Row) -> dict[str, str]:
    """Return what a rollout is, by label, as far as it is known."""
    sample = "" if row["sample_idx"] is None else f", sample {row['sample_idx']}"
    family = f", family {row['family']}" if row["family"] not in (None, row["task_id"]) else ""
    tokens = row.get("completion_tokens") if row.get("arm") is None else row.get("sampled_tokens")
    facts = {
        "run": str(shown_path(folder)),
        "arm": "" if row.get("arm") is None else f"{row['arm']}, training seed {row['train_seed']}",
        "task": f"{row['task_id']}{sample}{family}",
        "model": row.get("model"),
        "steps": ""
        if row["num_steps"] is None
        else f"{row['num_steps']}{f', {tokens:,} sampled tokens' if tokens else ''}",
        "ended by": row["terminated_by"],
    }
    return {label: str(value) for label, value in facts.items() if value}


def blocks(one: RolloutTranscript) -> Iterator[tuple[str, str]]:
    """Yield the messages of a rollout and the patch that it made, each with its title."""
    yield from ((message.title, message.content) for message in one.messages)
    if patch := one.rollout.get("submission"):
        yield "submitted patch", patch
    elif patch := one.rollout.get("patch"):
        yield "changes, not submitted", patch


def grading(row: Row) -> dict[str, str]:
    """Return the numbers and verdicts behind a reward by their names; empty for a rollout that was not graded."""
    found = {NAMES.get(name, name): row.get(name) for name in VERDICTS}
    for name, words in (("f2p", "fail-to-pass tests"), ("p2p", "pass-to-pass tests")):
        if row.get(f"{name}_total") is not None:
            found[words] = f"{row[f'{name}_passed']} of {row[f'{name}_total']} pass"
    for name, value in orjson.loads(row.get("metrics_json") or "{}").items():
        found.setdefault(name, value)
    found["searched for the solution"] = ", ".join(row.get("canary") or ())
    return {name: plain(value) for name, value in found.items() if value not in (None, "")}


def logs(row: Row) -> Iterator[tuple[str, str]]:
    """Yield why a rollout was graded so, each text with its title: the log of the tests, and the error."""
    if row.get("test_log"):
        yield "log of the tests", row["test_log"]
    if row["error_type"] or row["error"]:
        yield ": ".join(filter(None, ("error", row["error_type"]))), row["error"] or ""
