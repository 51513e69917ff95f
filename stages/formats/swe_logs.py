"""EvalLog logs of SWE-bench's harnesses, graded again: one rollout without steps for every log that has a verdict.

`composer import swe-logs FOLDER [ROWS]`. The lists of tests come from instance rows near the logs, else from the
harness's report, else from rows in a file that is named, else from files called after SWE-bench beside the folder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.envs.swe import eval_logs
from stages.envs.swe import eval_logs as regrading
from stages.envs.swe.eval_logs import EvalLog, Graded
from stages.errors import BadInput
from stages.formats.base import Drop, Numbered, Origin, Record, Trajectory, family_of
from stages.formats.files import Source
from stages.rollouts import missing

NAME = "swe-logs"
MISSING = frozenset({missing.STEPS, missing.OPENING, missing.FINISH, missing.PARSE, missing.ELISION})


@dataclass(frozen=True)
class Log(Source):
    """A saved log. Its digest is that of all its verdict depends on."""

    eval_log: EvalLog = field(compare=False)

    @cached_property
    def graded(self) -> Graded:
        """Graded when first asked."""
        return regrading.graded(self.eval_log)

    def records(self) -> Iterator[Numbered | Drop]:
        """What is known of the log, as one record."""
        yield 1, self.graded.record()


def find(paths: Sequence[str]) -> list[Log]:
    """The logs below folders; files among the paths are rows of instances."""
    given = [Path(path).expanduser() for path in paths]
    rows, folders = [path for path in given if path.is_file()], [path for path in given if not path.is_file()]
    if not folders:
        raise BadInput(
            f"{paths[0]} is a file. Name the folder that holds the logs; files beside it are rows of instances."
        )
    return [_log(folder, log) for folder in folders for log in eval_logs.find(folder, rows)]


def _log(folder: Path, log: EvalLog) -> Log:
    return Log((folder / log.file).resolve(), f"{folder.resolve().name}/{log.file}", log.digest, log)


def recognises(record: Any) -> bool:
    """Whether this is a graded log."""
    return isinstance(record, dict) and {"instance_id", "resolved", "grader", "tests_status"} <= record.keys()


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """One rollout without steps, or a drop that names the instance."""
    instance, resolved = record["instance_id"], record["resolved"]
    if resolved is None:
        reason = "validation_log" if record["problem"] == regrading.VALIDATION else "ungraded_log"
        yield origin.drop(reason, f"{instance}: {record['problem']}")
        return
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        opening=[],
        turns=[],
        missing=set(MISSING),
        model=record["model"],
        statement=None,
        family=family_of(instance),
        reward=float(resolved),
        resolved=resolved,
        submission=record["patch"] or None,
        extra={name: record[name] for name in ("said", "agrees", "tests_agree", "problem", "grader", "tests_status")},
    )
