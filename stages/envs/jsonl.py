"""Rows that a user names by path: JSON lines, plain or gzipped."""

import gzip
import json
import zlib
from pathlib import Path

from stages.errors import BadInput
from stages.runs.records import Row


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
