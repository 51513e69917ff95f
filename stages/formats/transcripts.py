"""Read rollouts back from rows for the writers of formats: opening, actions, observations, tokens; and `Writer`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO

import orjson

from composer_stages import json_text, messages
from composer_stages.messages import Message
from composer_stages.redaction import redacted_bytes
from composer_stages.rollouts.trace import by_rollout, prompt_ids, rollout_rows
from composer_stages.runs import store
from composer_stages.runs.kinds import ORIGIN, TASK, Row
from composer_stages.runs.run import Run

MARK = ("rollout_id", "task_id", "env", "family", "split")
"""Columns that identify a rollout, its task and its family; formats with room for them store them for readers."""

ORIGIN_COLUMNS = ["rollout_id", "submission", "tools_json"]
"""Columns of `origins` that are exported."""


def plain_arguments(text: str) -> Any:
    """Return a call's arguments as an object; None for a text that is none, or has numbers beyond those of JSON."""
    if not messages.is_object(text):
        return None
    arguments = json_text.loads(text)
    return None if any(True for _ in json_text.changed_numbers(arguments)) else arguments


BROKEN = ("env_error", "model_error")
"""Values of `terminated_by` after which the workspace is no submission."""


@dataclass(frozen=True)
class File:
    """A file to write: its name below the run, and a function that writes it and returns its number of records.

    `fill` is called once, with an open file. It removes keys of servers from the data, as `json_lines` and
    `small_file` do.
    """

    name: str
    fill: Callable[[BinaryIO], int]


def json_lines(name: str, rows: Iterable[Row]) -> File:
    """Return a file of JSON Lines, written row by row."""
    return File(name, lambda file: store.write_lines(file, rows))


def small_file(name: str, data: bytes, records: int) -> File:
    """Return a file of these bytes."""

    def fill(file: BinaryIO) -> int:
        file.write(redacted_bytes(data))
        return records

    return File(name, fill)


@dataclass(frozen=True)
class ExportedTurn:
    """One step row, the messages observed after it, and its prompt's token ids (None if not recorded)."""

    step: Row
    observed: list[Message]
    prompt: list[int] | None


@dataclass(frozen=True)
class ExportedTranscript:
    """One rollout: its rows, its messages, and fields that writers derive from them."""

    rollout: Row
    task: Row
    opening: list[Message]
    turns: list[ExportedTurn]

    mark: Row
    """The columns that identify the rollout."""
    tools: list[Row]
    """The tools that the model could call, as its environment or the imported file declared them."""
    submission: str | None
    """The submitted patch, else the workspace's patch when a limit ended the rollout; None if it broke down."""
    has_tokens: bool
    """Whether every step has token ids and log-probs, and each prompt extends the one before."""

    def chat(self) -> tuple[list[Row], list[Row]]:
        """Return the opening and the conversation as OpenAI chat messages, with numbered calls and ordered results."""
        numbers = iter(range(10**9))
        opening = messages.number_calls(self.opening, numbers)
        conversation: list[Message] = []
        for turn in self.turns:
            conversation += [{"role": "assistant", "content": turn.step["action"]}, *turn.observed]
        return opening, messages.number_calls(conversation, numbers)


@dataclass(frozen=True)
class Writer:
    """The writer of a format. A module declares it as `WRITER`."""

    lost: Sequence[str]
    """Facts that the format cannot store, for the report."""
    files: Callable[[Iterable[ExportedTranscript], Counter[str]], Iterable[File]]
    """Returns the files. The second argument counts dropped rollouts by reason once all files are filled. The
    transcripts may be iterated several times, and are read from the run each time."""


class Transcripts:
    """All rollouts of a run in their order, read from the run one after the other at every iteration."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks = {row["task_id"]: row for row in run.scan(TASK).rows()}

    def __iter__(self) -> Iterator[ExportedTranscript]:
        imported = self._run.holds(ORIGIN)
        origins = self._run.scan(ORIGIN).rows(ORIGIN_COLUMNS) if imported else repeat({})
        # Origins are written in the order of the rollouts, so that neither table has to be held in memory.
        for (rollout, steps), origin in zip(rollout_rows(self._run), origins, strict=bool(imported)):
            yield _transcript(rollout, steps, self._tasks[rollout["task_id"]], origin)


def transcripts_of_rows(
    rollouts: Sequence[Row], steps: Sequence[Row], tasks: Sequence[Row]
) -> list[ExportedTranscript]:
    """Return the transcripts of rows in memory, in the order of the rollouts, without origins."""
    grouped, tasks_by_id = by_rollout(list(steps)), {row["task_id"]: row for row in tasks}
    return [_transcript(row, grouped.get(row["rollout_id"], []), tasks_by_id[row["task_id"]], {}) for row in rollouts]


def _transcript(rollout: Row, steps: list[Row], task: Row, origin: Row) -> ExportedTranscript:
    gains = [orjson.loads(row["new_messages_json"]) for row in steps]
    opening, after = (gains[0] if gains else []), [gain[1:] for gain in gains[1:]]
    if steps:
        last: list[Message] = []
        if steps[-1]["observation"]:
            # States hold what was observed before an action, so the last observation is in none; its role is that of
            # the others, else a tool's where one was called.
            role = next((gain[0]["role"] for gain in reversed(after) if gain), None)
            role = role or ("tool" if messages.read(steps[-1]["action"]).calls else "user")
            last = [{"role": role, "content": steps[-1]["observation"]}]
        after.append(last)
    turns = [ExportedTurn(*parts) for parts in zip(steps, after, prompt_ids(steps), strict=True)]
    # After a breakdown of the environment or the model, the workspace may be in the middle of a change.
    workspace_patch = None if rollout["terminated_by"] in BROKEN else rollout.get("patch")
    submissions = (origin.get("submission"), rollout.get("submission"), workspace_patch)
    return ExportedTranscript(
        rollout=rollout,
        task=task,
        opening=opening,
        turns=turns,
        mark={name: rollout[name] for name in MARK},
        tools=orjson.loads(origin.get("tools_json") or rollout.get("tools_json") or "[]"),
        submission=next((text for text in submissions if text is not None), None),
        has_tokens=bool(turns)
        and all(t.prompt is not None and t.step["logprobs"] is not None and t.step["prefix_ok"] for t in turns),
    )
