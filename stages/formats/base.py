"""What an importer gives: trajectories, each with what its source does not record, and dropped records by reason."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import ConfigDict, SkipValidation, with_config

from stages.formats.reports import Sidecars
from stages.messages import Message
from stages.rollouts.missing import Fact

Record = dict[str, Any]
Numbered = tuple[int, Any]
"""A record and the line where it begins."""
STRICT = ConfigDict(strict=True, revalidate_instances="always")
"""`validation.check` looks into filled instances and converts nothing: 1 is a float, "1" and True are not."""
INSTANCE = re.compile(r"(?P<owner>[\w.-]+?)__(?P<name>[\w.-]+?)(?:-\d+|\.[0-9a-f]{8}(?:\.\w+)?)(?![\w-])")
"""An instance id: SWE-bench's `owner__name-NUMBER`, or SWE-smith's `owner__name.COMMIT.WHAT` and its environment's."""


@dataclass(frozen=True)
class Drop:
    """A record that was not imported: where it stood, a name for the reason, and the reason in words."""

    file: str
    line: int
    reason: str
    detail: str


@with_config(STRICT)
@dataclass
class ImportedTurn:
    """One action of the policy and what came back before the next one. None means that the source does not say."""

    action: str
    observed: list[Message] = field(default_factory=list)
    commands: list[str] | None = None
    parse_error: str | None = None
    finish_reason: str | None = None
    returncode: int | None = None
    raw_chars: int | None = None
    elided_chars: int | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    latency_s: float | None = None


@with_config(STRICT)
@dataclass
class Trajectory:
    """One rollout of one policy on one task, in the words of its source. What is kept as JSON text may be any JSON."""

    task_id: str
    env: str
    opening: list[Message]
    turns: list[ImportedTurn]
    missing: set[Fact]
    own_id: str | None = None
    model: str | None = None
    statement: str | None = None
    """The problem alone, without a harness's instructions around it."""
    family: str | None = None
    split: str | None = None
    reward: float | None = None
    resolved: bool | None = None
    submission: str | None = None
    """What was submitted for judging, a patch for example."""
    terminated_by: str | None = None
    error: tuple[str, str] | None = None
    sampling: SkipValidation[Record | None] = None
    seed: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    wall_s: float | None = None
    effective: bool | None = None
    """Whether it entered a training batch."""
    task_data: SkipValidation[Record] = field(default_factory=dict)
    tools: SkipValidation[list[Any]] = field(default_factory=list)
    extra: SkipValidation[Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Where a record stands, and what lies around it. `file` is the name of the file in rows and reports."""

    path: Path
    file: str
    sha256: str
    line: int
    sidecars: Sidecars

    def drop(self, reason: str, detail: str) -> Drop:
        """This record, dropped."""
        return Drop(self.file, self.line, reason, detail)


class Importer(Protocol):
    """A module of this package: one format."""

    __name__: str
    NAME: str
    MISSING: frozenset[Fact]
    """What no file of this format can tell."""

    def recognises(self, record: Any) -> bool:
        """Whether one record (a JSON document, a line, a row, a sample of an archive) is of this format."""
        ...

    def trajectories(self, record: Any, origin: Origin) -> Iterator[Trajectory | Drop]:
        """Everything one record holds. `KeyError`, `TypeError` and their like mean that it is malformed."""
        ...


@runtime_checkable
class JoiningImporter(Importer, Protocol):
    """A format whose rollouts are several records of a file."""

    def join(
        self, records: Iterator[Numbered | Drop], drop: Callable[[int, str, str], Drop]
    ) -> Iterator[Numbered | Drop]:
        """The records put together; `drop` makes a drop from line, reason and detail."""
        ...


def family_of(task_id: str) -> str:
    """What must stay together when tasks are split: the repository of a SWE-bench instance, else the task itself."""
    match = INSTANCE.fullmatch(task_id)
    return f"{match['owner']}/{match['name']}" if match else task_id


# ---- spent
# How long something took, from the timestamps that foreign records hold.


def seconds(begin: Any, end: Any) -> float | None:
    """Seconds between two ISO 8601 timestamps; None where either is none, or they do not follow each other."""
    try:
        passed = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (TypeError, ValueError):
        return None
    return passed if passed >= 0 else None
