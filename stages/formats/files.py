"""Foreign files: finding them, and reading them record by record.

A bad record is dropped with its line number, the rest is kept. A record is a line of JSON Lines, an element of a JSON
array of objects, a whole JSON document, a row of Parquet, or a sample of an Inspect archive together with the archive's
header.
"""

import gzip
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput
from stages.formats.base import Drop, Numbered
from stages.formats.reports import stem

# ---- archives
# Inspect's `.eval` archives: zip files, some with Zstandard, of a header and one JSON document a sample.

HEADERS = ("header.json", "_journal/start.json")
ZSTD = 93
"""The compression method of recent archives, which zipfile itself knows only from Python 3.14 on."""
DAMAGE = (zipfile.BadZipFile, OSError, ValueError, KeyError, zlib.error, EOFError, pa.ArrowException)


def samples(path: Path) -> Iterator[tuple[Any, str]]:
    """Every sample as a log with that one sample, or None and what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            header: Any = next((json.loads(member(archive, name)) for name in HEADERS if name in names), {})
            for name in sorted(name for name in names if name.startswith("samples/")):
                yield _sample(archive, name, header)
    except DAMAGE as error:
        yield None, str(error)


def _sample(archive: zipfile.ZipFile, name: str, header: Any) -> tuple[Any, str]:
    try:
        return {**header, "samples": [json.loads(member(archive, name))]}, ""
    except DAMAGE as error:
        return None, f"{name}: {error}"


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member."""
    info = archive.getinfo(name)
    if info.compress_type != ZSTD:
        return archive.read(name)
    with open(str(archive.filename), "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        return pa.input_stream(pa.py_buffer(file.read(info.compress_size)), compression="zstd").read()


READABLE = (".json", ".jsonl", ".ndjson", ".traj", ".eval", ".parquet", ".gz")
OF_A_RUN = ("report.json", "results.json", "result.json", "results/results.json", "logs/*/report.json")
"""Where harnesses leave reports, below the folder of a run."""
BESIDE = ("metadata.json", "{stem}.metadata.json", "{stem}.report.json", *OF_A_RUN)
LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Source:
    """One foreign file; `label` names it in rows and reports.

    `root`: the folder or file that the user gave, by which it was found. `beside`: it was not asked for, and is read
    only for what it says about others.
    """

    path: Path
    label: str
    sha256: str
    root: Path = field(default=Path("/"), kw_only=True, compare=False)
    beside: bool = field(default=False, kw_only=True, compare=False)

    def records(self) -> Iterator[Numbered | Drop]:
        """Every record with its line number (from 1), or the reason why it cannot be read."""
        with self.path.open("rb") as file:
            head = file.read(64)
        if head.startswith(LFS):
            yield self.drop(1, "git_lfs_pointer", "a Git LFS pointer, not the file: fetch it with `git lfs pull`")
        elif head.startswith(b"PAR1"):
            yield from self._rows()
        elif head.startswith(b"PK\x03\x04"):
            yield from self._samples()
        else:
            yield from self._texts()

    def drop(self, line: int, reason: str, detail: str) -> Drop:
        """A record of this file that cannot be imported."""
        return Drop(self.label, line, reason, detail)

    def _rows(self) -> Iterator[Numbered | Drop]:
        number = 0
        try:
            # Buffered, the whole file would be in memory at its end.
            for batch in pq.ParquetFile(self.path, pre_buffer=False).iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pa.ArrowException, OSError) as error:
            yield self.drop(number + 1, "damaged_file", str(error))

    def _samples(self) -> Iterator[Numbered | Drop]:
        for number, (value, problem) in enumerate(samples(self.path), 1):
            yield self.drop(number, "damaged_record", problem) if problem else (number, value)

    def _texts(self) -> Iterator[Numbered | Drop]:
        lines = Lines(self.path)
        stream = iter(lines)
        head = list(islice(stream, 2))
        if len(head) == 2 and isinstance(_json(head[0][1]), dict | list):
            yield from self._each(chain(head, stream))
        else:
            yield from self._whole([*head, *stream])
        if lines.torn:
            yield self.drop(lines.number + 1, "damaged_file", lines.torn)

    def _each(self, lines: Iterator[Numbered]) -> Iterator[Numbered | Drop]:
        for number, line in lines:
            value = _json(line)
            yield (number, value) if value is not None else self.drop(number, "not_json", _why(line)[1])

    def _whole(self, lines: list[Numbered]) -> Iterator[Numbered | Drop]:
        """One document; or JSON Lines whose first line is bad; or a broken document, which is one dropped record."""
        text = b"".join(line for _, line in lines)
        value = _json(text)
        if value is not None:
            yield from enumerate(value, 1) if _is_table(value) else [(1, value)]
        elif any(isinstance(_json(line), dict) for _, line in lines):
            yield from self._each(iter(lines))
        elif text:
            yield self.drop(_why(text)[0], "not_json", _why(text)[1])


class Lines:
    """The lines of a text file, plain or gzip, that are not blank. `torn` says why reading stopped early, if it did."""

    def __init__(self, path: Path) -> None:
        self.path, self.number, self.torn = path, 0, ""

    def __iter__(self) -> Iterator[Numbered]:
        try:
            with self.path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
            with gzip.open(self.path) if packed else self.path.open("rb") as file:
                for self.number, line in enumerate(file, 1):
                    if line.strip():
                        yield self.number, line
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
            self.torn = str(error)


def _is_table(value: Any) -> bool:
    """Whether an array holds records, rather than being one (a list of messages or of captured calls)."""
    parts = ("role", "prompt_token_ids", "kind")
    return isinstance(value, list) and all(isinstance(v, dict) and not any(p in v for p in parts) for v in value)


def _json(text: bytes) -> Any:
    """The value of a JSON text; None where it is none (or null, which is no record either)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _why(text: bytes) -> tuple[int, str]:
    """At which line a text stops being JSON, and how."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        shown = error.doc.split("\n")[error.lineno - 1][:40].strip()
        return error.lineno, f"{error.msg} at column {error.colno}; the line begins {shown!r}"
    except (ValueError, RecursionError) as error:
        return 1, str(error)
    return 1, "null is no record"


@dataclass(frozen=True)
class Found:
    """Where a file was found; the fields are those of `Source`."""

    path: Path
    label: str
    root: Path
    beside: bool = False


def find(patterns: list[str]) -> list[Source]:
    """The readable files that paths, folders and patterns name, in a fixed order, and what lies beside them.

    `BadInput` names what is missing.
    """
    asked: dict[Path, Found] = {}
    beside: dict[Path, Found] = {}
    for pattern in patterns:
        here = _matching(Path(pattern).expanduser())
        if not here:
            raise BadInput(f"{pattern} is neither a file nor a folder with files to import ({', '.join(READABLE)}).")
        for found in here:
            (beside if found.beside else asked).setdefault(found.path, found)
    every = [*asked.values(), *(found for path, found in beside.items() if path not in asked)]
    return [Source(f.path, f.label, _sha256(f.path), root=f.root, beside=f.beside) for f in every]


def _matching(path: Path) -> list[Found]:
    if path.is_file():
        own, folder = path.resolve(), path.resolve().parent
        names = [name.format(stem=stem(own)) for name in BESIDE]
        asked = [Found(own, f"{folder.name}/{own.name}", own)]
        return asked + _beside(folder, names) + _beside(folder.parent, OF_A_RUN)
    if path.is_dir():
        folder = path.resolve()
        inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in READABLE)
        asked = [Found(p.resolve(), f"{folder.name}/{p.relative_to(path)}", folder) for p in inside]
        return asked + _beside(folder.parent, OF_A_RUN) if asked else []
    if any(character in path.name for character in "*?["):
        return [found for match in sorted(path.parent.glob(path.name)) for found in _matching(match)]
    return []


def _beside(folder: Path, names: Sequence[str]) -> list[Found]:
    """What lies in a folder under these names or patterns."""
    there = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    return [Found(path, f"{folder.name}/{path.relative_to(folder)}", folder, beside=True) for path in there]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
