"""Tasks from the table of a run, in its order, instead of those that an environment draws."""

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from stages.envs.base import Split, Task
from stages.errors import BadInput, UsageError
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.records import TASK, Row

COLUMNS = ("task_id", "env", "split", "family", "prompt")


def task(row: Mapping[str, Any]) -> Task:
    """The task of a `task/1` row."""
    return Task(**{name: row[name] for name in COLUMNS}, data=orjson.loads(row["data_json"]))


def tasks(folder: str, env: str, split: Split, count: int) -> list[Task]:
    """At most `count` tasks of a split from a run, in its order; `UsageError` where they are another environment's."""
    run = _run(folder)
    chosen = [task(row) for row in run.scan(TASK).rows() if row["split"] == split][:count]
    if not chosen:
        raise UsageError(f"{folder} holds no task of the split {split!r}. Set env.split, or make another curriculum.")
    if others := sorted({one.env for one in chosen} - {env}):
        raise UsageError(f"{folder} holds tasks of {others[0]}, and {env} is to be played. Set env.name={others[0]}.")
    return chosen


def identity(folder: str) -> str:
    """A digest of a run's tasks, wherever it lies."""
    run = _run(folder)
    return store.digest([output["content_sha256"] for name, output in run.manifest.outputs.items() if name == "tasks"])


def _run(folder: str) -> Run:
    return Run(Path(folder).expanduser())


# ---- jsonl
# Rows that a user names by path: JSON lines, plain or gzipped.


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON objects, one a line.

    A file named *.gz is unpacked. The tokens NaN, Infinity and -Infinity, which are no JSON but which Python and others
    write, are read as None: the number is unknown. `BadInput` names the file, and the line where there is one.
    """
    lines = _text(path).split("\n")
    return [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged ({error}). Get it anew.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}). Name a file of JSON lines.") from None


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}, line {number}, is not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise BadInput(f"{path}, line {number}, is {line.strip()[:40]!r}, not a JSON object.")
    return row
