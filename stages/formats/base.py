"""Types of readers, trajectories and dropped records, and functions that several readers share."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, SkipValidation, with_config

from composer_stages.data_files import load_toml
from composer_stages.formats.measurement import MeasuredLog, MeasuredSample
from composer_stages.formats.reports import Sidecars
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.rollouts.missing import Fact
from composer_stages.words import Sentence

Record = dict[str, Any]
Node = TypeVar("Node", bound=Hashable)
NumberedRecord = tuple[int, Any]
"""A record and the line where it begins."""
FIELDS = load_toml(__package__, "fields.toml")
"""Names in the files of other programs, by format."""
STRICT = ConfigDict(strict=True, revalidate_instances="always")
"""`reading.check` validates filled instances and converts nothing: 1 is a float, "1" and True are not."""
# GitHub's names have at most 100 characters. Without a bound an id takes the square of its length, or the cube.
INSTANCE = re.compile(r"(?P<owner>[\w.-]{1,100}?)__(?P<name>[\w.-]{1,100}?)(?:-\d+|\.[0-9a-f]{8}(?:\.\w+)?)(?![\w-])")
"""An instance id: SWE-bench's `owner__name-NUMBER`, or SWE-smith's `owner__name.COMMIT.WHAT` and its environment's."""


WITHOUT_TRANSCRIPT = frozenset({missing.STEPS, missing.OPENING})
"""Facts that files of results lack, which hold no transcript."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading a record raises that is not as its format says."""
DAMAGE_REASONS = frozenset(
    [
        "damaged_file",
        "damaged_record",
        "git_lfs_pointer",
        "not_json",
        "not_utf8",
        "too_deep",
        "too_large",
        "unread_kind",
    ]
)
"""Reasons of a `Drop` that say nothing of what the record holds."""
RECORDED_REWARD = "recorded_reward"
"""Key of `Trajectory.extra` for a reward that a source records for a rollout in which the model did nothing."""


@dataclass(frozen=True)
class Drop:
    """A record that was not imported: its file and line, the name of the reason, and the details."""

    file: str
    line: int
    reason: str
    detail: str

    @property
    def is_damage(self) -> bool:
        """Whether the record could not be read at all, so that it may be one of any format, or many."""
        return self.reason in DAMAGE_REASONS


@with_config(STRICT)
@dataclass
class ImportedTurn:
    """One action of the policy and the messages before the next one; None: the source does not record the field."""

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
    """One rollout of one policy on one task as its source records it. Fields stored as JSON text may hold any JSON."""

    task_id: str = ""
    """Empty: the source names no task. `reading.completed` then names it by a digest of the first question."""
    env: str = ""
    """Empty: SWE-bench for an instance of it, else the format."""
    opening: list[Message] = field(default_factory=list)
    turns: list[ImportedTurn] = field(default_factory=list)
    """Empty: the source has no transcript, or the rollout failed before its first action."""
    missing: set[Fact] = field(default_factory=set)
    """Facts that this record lacks, beyond those that its format lacks and those that rows show (`rows.absent`)."""
    own_id: str | None = None
    model: str | None = None
    statement: str | None = None
    """The problem statement, without a harness's instructions around it."""
    family: str | None = None
    split: str | None = None
    log: SkipValidation[MeasuredLog | None] = None
    """What the log is of; None: `reading.completed` knows the format, the environment and the model alone."""
    measured: SkipValidation[MeasuredSample] = field(default_factory=MeasuredSample)
    """What was scored. Where a reader gives scores, `reading.completed` makes one of them the reward."""
    reward: float | None = None
    resolved: bool | None = None
    unscored: bool = False
    """The source records whether it scored the rollout: a reward of None stays None whatever reports say."""
    judged: bool = True
    """Whether a report's verdict on the file or its instance applies to this rollout."""
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
    """The file and line of a record, and the sidecar files. `file` is the file's name in rows and reports."""

    path: Path
    file: str
    sha256: str
    line: int
    sidecars: Sidecars

    def log(self, key: Hashable, make: Callable[[], MeasuredLog]) -> MeasuredLog:
        """Return what a log of this file is of, which is made once; key: which of its logs."""
        return self.sidecars.log((self.path, key), make)

    def make_drop(self, reason: str, detail: str) -> Drop:
        """Return the drop of this record with the name of the reason and the details."""
        return Drop(self.file, self.line, reason, detail)


@dataclass(frozen=True)
class Reader:
    """One layout of a program's files. A module lists its readers in `READERS`."""

    name: str
    """The name of the format, the value of the column `source`."""
    recognises: Callable[[Any], bool]
    """Whether one record (a JSON document, a line, a row, a sample of an archive) has this layout."""
    trajectories: Callable[[Any, Origin], Iterator[Trajectory | Drop]]
    """Yield the rollouts of one record. `KeyError`, `TypeError` and the like mean that the record is malformed."""
    missing: frozenset[Fact] = frozenset()
    """Facts that no file of this layout records although its rows may look as if one did (`rows.absent`)."""
    join: (
        Callable[[Iterator[NumberedRecord | Drop], Callable[[int, str, str], Drop]], Iterator[NumberedRecord | Drop]]
        | None
    ) = None
    """Joins the records of a file of which several make one rollout; the second argument makes a drop from line, reason
    and detail."""
    describes: bool = False
    """Whether a record describes a rollout of its folder or of a file above, and is a rollout only without one."""
    judges: bool = False
    """Whether a record judges rollouts of any other files, and holds rollouts only where there are none."""
    submits: bool = False
    """Whether a record is what a rollout submitted, and a rollout itself only where no other file holds any."""


def family_of(task_id: str) -> str:
    """Return the family of a task: the repository of a SWE-bench instance, else the task itself."""
    match = INSTANCE.fullmatch(task_id)
    return f"{match['owner']}/{match['name']}" if match else task_id


def has_keys(record: Any, keys: str) -> bool:
    """Return whether a record is an object with all of these keys."""
    return isinstance(record, dict) and record.keys() >= set(keys.split())


def read_marks(marks: Record) -> Record:
    """Return the fields of a trajectory that our writers note where their format has no place for them."""
    resolved = marks.get("hidden_pass", marks.get("resolved"))
    return {"resolved": resolved} | {name: marks.get(name) for name in ("family", "split", "submission")}


def find_instance(names: Iterable[Any]) -> str | None:
    """Return the first of several names that is an instance id, None without one."""
    return next((name for name in names if isinstance(name, str) and INSTANCE.fullmatch(name)), None)


def path_to_root(node: Node, parent_of: Callable[[Node], Node | None], name: str) -> list[Node]:
    """Return a node of a tree and its ancestors, the root last; `ValueError` for a node that is its own ancestor."""
    path: dict[Node, None] = {}
    ancestor: Node | None = node
    while ancestor is not None:
        if ancestor in path:
            raise ValueError(Sentence("formats.own-ancestor", node=f"{name} {ancestor}"))
        path[ancestor] = None
        ancestor = parent_of(ancestor)
    return list(path)


def seconds(begin: Any, end: Any) -> float | None:
    """Return the seconds between two ISO 8601 timestamps; None if one is invalid, or `end` is before `begin`."""
    try:
        passed = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (TypeError, ValueError):
        return None
    return passed if passed >= 0 else None
