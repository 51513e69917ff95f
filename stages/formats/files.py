"""Foreign files: finding them, and reading them record by record.

A record is a line of JSON Lines, an element of a JSON array of objects, a whole JSON document, a row of Parquet, or a
sample of an Inspect archive together with the archive's header. A bad record is dropped with its line number, the rest
is kept.
"""

import gzip
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput
from stages.formats.base import Drop, Numbered
from stages.formats.reports import SB_CLI, stem
from stages.runs import store
from stages.runs.artifact import Run

READABLE = (".json", ".jsonl", ".ndjson", ".traj", ".eval", ".parquet", ".gz")
OF_A_RUN = (
    *("report.json", "results.json", "result.json", "results/results.json", "logs/*/report.json"),
    f"{SB_CLI}/*.json",
)
"""Where harnesses leave reports, below the folder of a run."""
BESIDE = ("metadata.json", "{stem}.metadata.json", "{stem}.report.json", *OF_A_RUN)
PARTS = {"role", "prompt_token_ids", "kind"}
"""Keys of the parts of one record: of messages, of captured calls, of OpenHands' events."""
LFS = b"version https://git-lfs.github.com/spec/"
HEADERS = ("header.json", "_journal/start.json")
"""Members of an Inspect archive that hold its header, the first that is there."""
ZSTD = 93
"""The compression method of recent Inspect archives, which zipfile itself knows only from Python 3.14 on."""
DAMAGE = (zipfile.BadZipFile, OSError, ValueError, KeyError, zlib.error, EOFError, pa.ArrowException)


@dataclass(frozen=True)
class Source:
    """One foreign file; `label` names it in rows and reports.

    `root`: the folder or file that the user gave, by which it was found. `beside`: the user did not give it; it is read
    only as a description or report of other files.
    """

    path: Path
    label: str
    sha256: str
    root: Path = field(default=Path("/"), kw_only=True, compare=False)
    beside: bool = field(default=False, kw_only=True, compare=False)

    def records(self) -> Iterator[Numbered | Drop]:
        """Yield every record with its line number (from 1), or the reason why it cannot be read."""
        with self.path.open("rb") as file:
            head = file.read(64)
        # By content, not by name: data sets store JSON Lines as `.json` and gzip without `.gz`.
        if head.startswith(LFS):
            yield self.make_drop(1, "git_lfs_pointer", "a Git LFS pointer, not the file: fetch it with `git lfs pull`")
        elif head.startswith(b"PAR1"):
            number = 0
            try:
                # With pre_buffer, pyarrow would hold the file in memory by its end.
                for batch in pq.ParquetFile(self.path, pre_buffer=False).iter_batches(1024):
                    for row in self._rows(batch, number):
                        number += 1
                        yield row
            except (pa.ArrowException, OSError) as error:
                yield self.make_drop(number + 1, "damaged_file", str(error))
        elif head.startswith(b"PK\x03\x04"):
            yield from self._archive_samples()
        else:
            yield from self._json_records()

    def _rows(self, batch: pa.RecordBatch, before: int) -> Iterator[Numbered | Drop]:
        """Yield the rows of a batch with their numbers; one that holds text which is no UTF-8 is a drop."""
        try:
            yield from enumerate(batch.to_pylist(), before + 1)
        except UnicodeDecodeError:  # a column of text is not checked when it is read
            for at in range(len(batch)):
                try:
                    yield before + at + 1, batch.slice(at, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield self.make_drop(before + at + 1, "not_utf8", str(error))

    def make_drop(self, line: int, reason: str, detail: str) -> Drop:
        """Return the drop of the record at a line of this file, with the name of the reason and the reason in words."""
        return Drop(self.label, line, reason, detail)

    def _archive_samples(self) -> Iterator[Numbered | Drop]:
        """Yield every sample of an Inspect archive as a log with that one sample.

        An archive is a zip file, some with Zstandard, of a header and one JSON document a sample.
        """
        number = 0
        try:
            with zipfile.ZipFile(self.path) as archive:
                # Without `header.json` the evaluation is still running or was killed: only its start is recorded.
                names = archive.namelist()
                header: Any = next((json.loads(_member(archive, name)) for name in HEADERS if name in names), {})
                for name in sorted(name for name in names if name.startswith("samples/")):
                    number += 1
                    # A sample may be damaged (a wrong checksum) in an archive whose directory is intact.
                    try:
                        sample = {**header, "samples": [json.loads(_member(archive, name))]}
                    except DAMAGE as error:
                        yield self.make_drop(number, "damaged_record", f"{name}: {error}")
                    else:
                        yield number, sample
        except DAMAGE as error:
            yield self.make_drop(number + 1, "damaged_record", str(error))

    def _json_records(self) -> Iterator[Numbered | Drop]:
        """Yield the lines of JSON Lines, the elements of an array of objects, or the one document.

        A broken document is one dropped record, unless any of its lines is an object: then it is JSON Lines whose
        first line is broken.
        """
        damage: list[Drop] = []
        lines = self._lines(damage)
        head = list(islice(lines, 2))
        json_lines: Iterable[tuple[int, bytes]] = []
        # JSON Lines are read one by one, since files of rollouts outgrow the memory; a document has to be read as one.
        if len(head) == 2 and isinstance(_parse(head[0][1])[0], dict | list):
            json_lines = chain(head, lines)
        else:
            rest = [*head, *lines]
            text = b"".join(line for _, line in rest)
            value, number, reason = _parse(text)
            # An array is a table of records unless it is one record: a list of messages or of captured calls.
            is_table = isinstance(value, list) and all(
                isinstance(item, dict) and not PARTS & item.keys() for item in value
            )
            if value is not None:
                yield from enumerate(value, 1) if is_table else [(1, value)]
            elif any(isinstance(_parse(line)[0], dict) for _, line in rest):
                json_lines = rest
            elif text:
                yield self.make_drop(number, "not_json", reason)
        for number, line in json_lines:
            value, _, reason = _parse(line)
            yield (number, value) if value is not None else self.make_drop(number, "not_json", reason)
        # Last, so that the records before the damage keep their lines.
        yield from damage

    def _lines(self, damage: list[Drop]) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a text file, plain or gzip, that are not blank; add a drop where reading stops early."""
        number = 0
        try:
            with self.path.open("rb") as file:
                is_packed = file.read(2) == b"\x1f\x8b"
            with gzip.open(self.path) if is_packed else self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
            damage.append(self.make_drop(number + 1, "damaged_file", str(error)))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a member of an archive."""
    info = archive.getinfo(name)
    if info.compress_type != ZSTD:
        return archive.read(name)
    with open(str(archive.filename), "rb") as file:
        # A local header: 30 bytes, of which 26-27 and 28-29 are the lengths of the name and the extra field behind it.
        file.seek(info.header_offset)
        header = file.read(30)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        return pa.input_stream(pa.py_buffer(file.read(info.compress_size)), compression="zstd").read()


def _parse(text: bytes) -> tuple[Any, int, str]:
    """Return the value of a JSON text; for invalid text and null None, the line of the error, and the reason."""
    try:
        return json.loads(text), 1, "null is no record"
    except json.JSONDecodeError as error:
        shown = error.doc.split("\n")[error.lineno - 1][:40].strip()
        return None, error.lineno, f"{error.msg} at column {error.colno}; the line begins {shown!r}"
    except (ValueError, RecursionError) as error:
        return None, 1, str(error)


def find(patterns: list[str]) -> list[Source]:
    """Return the readable files that paths, folders and patterns name, in a fixed order, then the files beside them.

    Raises `BadInput` that names what is missing.
    """
    asked: dict[Path, Source] = {}
    beside: dict[Path, Source] = {}
    for pattern in patterns:
        matches = _matching(Path(pattern).expanduser())
        if not matches:
            raise BadInput(f"{pattern} is neither a file nor a folder with files to import ({', '.join(READABLE)}).")
        for found in matches:
            (beside if found.beside else asked).setdefault(found.path, found)
    every = [*asked.values(), *(found for path, found in beside.items() if path not in asked)]
    return [replace(found, sha256=store.file_sha256(found.path)) for found in every]


def _matching(path: Path) -> list[Source]:
    """Return the files that one path, folder or pattern names, and the files beside them, without their digests."""
    if path.is_file():
        own, folder = path.resolve(), path.resolve().parent
        names = [name.format(stem=stem(own)) for name in BESIDE]
        asked = [Source(own, f"{folder.name}/{own.name}", "", root=own)]
        return asked + _beside(folder, names) + _beside(folder.parent, OF_A_RUN)
    if path.is_dir():
        folder = path.resolve()
        inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in READABLE)
        inside = _without_own(inside)
        asked = [Source(p.resolve(), f"{folder.name}/{p.relative_to(path)}", "", root=folder) for p in inside]
        return asked + _beside(folder.parent, OF_A_RUN) if asked else []
    if any(character in path.name for character in "*?["):
        return [found for match in sorted(path.parent.glob(path.name)) for found in _matching(match)]
    return []


def _without_own(files: Sequence[Path]) -> list[Path]:
    """Leave out the files by which Composer describes a run: of a run folder only what an export wrote is foreign."""
    exported: dict[Path, set[Path]] = {}
    for path in files:
        if path.name == "manifest.json":
            with suppress(BadInput):  # a manifest of another program
                outputs = Run(path.parent).manifest.outputs.values()
                foreign = [out["file"] for out in outputs if out["kind"].startswith("foreign/")]
                exported[path.parent] = {path.parent / name for name in foreign}
    # A run folder may lie in the folder of another one: the nearest counts.
    runs = {path: next((folder for folder in path.parents if folder in exported), None) for path in files}
    return [path for path, run in runs.items() if run is None or path in exported[run]]


def _beside(folder: Path, names: Sequence[str]) -> list[Source]:
    """Return the files of a folder under these names or patterns."""
    there = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    return [Source(path, f"{folder.name}/{path.relative_to(folder)}", "", root=folder, beside=True) for path in there]
