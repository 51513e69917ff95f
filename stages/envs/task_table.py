"""Tasks and rows that the user names by path: the task table of a run in its order, and files of JSON lines."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
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
    """Return the task of a `task/1` row."""
    return Task(**{name: row[name] for name in COLUMNS}, data=orjson.loads(row["data_json"]))


def tasks(folder: str, env: str, split: Split, count: int) -> list[Task]:
    """Return at most `count` tasks of a split from a run, in its order; raise UsageError for another environment's."""
    run = Run(Path(folder).expanduser())
    chosen = [task(row) for row in run.scan(TASK).rows() if row["split"] == split][:count]
    if not chosen:
        raise UsageError(f"{folder} holds no task of the split {split!r}. Set env.split, or make another curriculum.")
    if others := sorted({one.env for one in chosen} - {env}):
        raise UsageError(f"{folder} holds tasks of {others[0]}, and {env} is to be played. Set env.name={others[0]}.")
    return chosen


def identity(folder: str) -> str:
    """Return a digest of a run's tasks, independent of the run's path."""
    run = Run(Path(folder).expanduser())
    return store.digest([output["content_sha256"] for name, output in run.manifest.outputs.items() if name == "tasks"])


def read_rows(path: Path) -> list[Row]:
    """Read a file of JSON objects, one a line.

    A file named *.gz is unpacked. The tokens NaN, Infinity and -Infinity, which are no JSON but which Python and others
    write, are read as None: the number is unknown. Raises BadInput with the file, and the line where there is one.
    """
    return [parse_line(path, number, line) for number, line in numbered_lines(path)]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not blank with their numbers; BadInput where it cannot be read."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged ({error}). Get it anew.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}). Name a file of JSON lines.") from None
    # split and not splitlines, which also cuts at U+2028 and its like, and these are legal inside a JSON string.
    yield from ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parse_line(path: Path, number: int, line: str) -> Row:
    """Return the JSON object of a line; BadInput names file and line where it is none."""
    try:
        # json and not orjson: orjson refuses the tokens NaN and Infinity, which parse_constant maps to None.
        row = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}, line {number}, is not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise BadInput(f"{path}, line {number}, is {line.strip()[:40]!r}, not a JSON object.")
    return row
