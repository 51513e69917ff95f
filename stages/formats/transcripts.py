"""Rollouts read back from rows: opening, actions, what was observed, tokens; and chat messages in OpenAI's form."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import BinaryIO, Protocol

import orjson

from stages import messages
from stages.messages import Message
from stages.redaction import redacted_bytes
from stages.rollouts.trace import by_rollout, prompt_ids, rollout_rows
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import ORIGIN, TASK, Row

MARK = ("rollout_id", "task_id", "env", "family", "split")
"""What identifies a rollout, its task and its family; formats with room for it carry it, and importers read it back."""

ORIGINS = ["rollout_id", "submission", "tools_json"]
"""What is exported of where a rollout comes from."""

BROKEN = ("env_error", "model_error")
"""Ends that are nobody's work."""


@dataclass(frozen=True)
class File:
    """A file to be written: its name below the run, and what writes it and returns how many records that were.

    `fill` is called once, with a file that is open. It keeps keys of servers out of what it writes, as `json_lines` and
    `whole` do.
    """

    name: str
    fill: Callable[[BinaryIO], int]


def json_lines(name: str, rows: Iterable[Row]) -> File:
    """A file of one JSON object a line, which are taken one after the other."""
    return File(name, lambda file: store.write_lines(file, rows))


def whole(name: str, data: bytes, records: int) -> File:
    """A small file."""

    def fill(file: BinaryIO) -> int:
        file.write(redacted_bytes(data))
        return records

    return File(name, fill)


@dataclass(frozen=True)
class ExportedTurn:
    """One step with what was observed after it, and the token ids before it where they are known."""

    step: Row
    observed: list[Message]
    prompt: list[int] | None


@dataclass(frozen=True)
class ExportedTranscript:
    """One rollout with everything that is known about it."""

    rollout: Row
    task: Row
    origin: Row
    opening: list[Message]
    turns: list[ExportedTurn]

    @property
    def mark(self) -> Row:
        """Who this rollout is."""
        return {name: self.rollout[name] for name in MARK}

    @property
    def tools(self) -> list[Row]:
        """What the model could call, as its environment, or the program that it was imported from, declared it."""
        declared: list[Row] = orjson.loads(self.origin.get("tools_json") or self.rollout.get("tools_json") or "[]")
        return declared

    @property
    def submission(self) -> str | None:
        """What was handed in, else what the episode left behind when a limit ended it; None of one that broke down."""
        left = None if self.rollout["terminated_by"] in BROKEN else self.rollout.get("patch")
        known = (self.origin.get("submission"), self.rollout.get("submission"), left)
        return next((text for text in known if text is not None), None)

    @property
    def has_tokens(self) -> bool:
        """Whether every step has ids and log-probs, each prompt going on from the one before."""
        return bool(self.turns) and all(
            turn.prompt is not None and turn.step["logprobs"] is not None and turn.step["prefix_ok"]
            for turn in self.turns
        )


class Exporter(Protocol):
    """A module of this package: one format."""

    LOST: Sequence[str]
    """What the format has no room for."""

    def files(self, transcripts: Iterable[ExportedTranscript], dropped: Counter[str]) -> Iterable[File]:
        """The files; what is not in them is counted, by reason, by the time that all are filled.

        `transcripts` may be gone through several times, and are then read again.
        """
        ...


class Transcripts:
    """All rollouts of a run in their order, read one after the other whenever they are gone through."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks = {row["task_id"]: row for row in run.scan(TASK).rows()}

    def __iter__(self) -> Iterator[ExportedTranscript]:
        imported = self._run.holds(ORIGIN)
        origins = self._run.scan(ORIGIN).rows(ORIGINS) if imported else repeat({})
        for (rollout, steps), origin in zip(rollout_rows(self._run), origins, strict=bool(imported)):
            yield _transcript(rollout, steps, self._tasks[rollout["task_id"]], origin)


def transcripts(
    rollouts: Sequence[Row], steps: Sequence[Row], tasks: Sequence[Row], origins: Sequence[Row]
) -> list[ExportedTranscript]:
    """All rollouts of rows that are in memory, in their order; those that are not imported have no origin."""
    grouped, known = by_rollout(list(steps)), {row["task_id"]: row for row in tasks}
    came = {row["rollout_id"]: row for row in origins}
    return [
        _transcript(row, grouped.get(row["rollout_id"], []), known[row["task_id"]], came.get(row["rollout_id"], {}))
        for row in rollouts
    ]


def _transcript(rollout: Row, steps: list[Row], task: Row, origin: Row) -> ExportedTranscript:
    gains = [orjson.loads(row["new_messages_json"]) for row in steps]
    opening, after = (gains[0] if gains else []), [gain[1:] for gain in gains[1:]]
    last = steps[-1]["observation"] if steps else ""
    after += [[{"role": _role(steps, after), "content": last}] if last else []]
    prompts = prompt_ids(steps)
    turns = [ExportedTurn(*parts) for parts in zip(steps, after[: len(steps)], prompts, strict=True)]
    return ExportedTranscript(rollout, task, origin, opening, turns)


def _role(steps: list[Row], after: list[list[Message]]) -> str:
    """The role of the last observation: that of the others, else a tool's where one was called."""
    shown = next((gain[0]["role"] for gain in reversed(after) if gain), None)
    return shown or ("tool" if messages.read(steps[-1]["action"]).calls else "user")


def chat(transcript: ExportedTranscript) -> tuple[list[Row], list[Row]]:
    """Opening and the rest as OpenAI chat messages; calls are numbered, and their results follow in the same order."""
    numbers = iter(range(10**9))
    opening = messages.numbered(transcript.opening, numbers)
    rest = [
        m for turn in transcript.turns for m in ({"role": "assistant", "content": turn.step["action"]}, *turn.observed)
    ]
    return opening, messages.numbered(rest, numbers)
