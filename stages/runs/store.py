"""Files of a run: sealed `jsonl.gz`, open journals, Parquet tables. Nothing else in the project opens an artifact file.

A sealed file is written whole to a temporary name, flushed, fsynced and renamed, so a file under its final name is
never torn. An open journal (`.jsonl.open`) may end in a torn line, which counts as not written. Keys of servers are
kept out of all files (`stages.redaction`).
"""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput
from stages.redaction import redacted_bytes, redacted_value
from stages.runs.kinds import Kind
from stages.runs.records import Row, parse_kind


def encode(value: Any) -> bytes:
    """Canonical JSON: keys sorted, no spaces, UTF-8. Equal values give equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, in hex."""
    return hashlib.sha256(encode(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """SHA-256 over the relative names and bytes of all files below a folder, in hex; the files' times do not matter."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return digest([[str(p.relative_to(folder)), file_sha256(p)] for p in files])


def write_sealed(path: Path, data: bytes) -> None:
    """Write a whole file so that it is either there complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(redacted_bytes(data))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, indented for people, keys sorted."""
    write_sealed(
        path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)
    )


def read_json(path: Path) -> Any:
    """Read one JSON document; `BadInput` names the file when it is missing or malformed."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist.") from None
    except orjson.JSONDecodeError as error:
        raise BadInput(
            f"{path} is not valid JSON ({error}). Delete it and rerun the stage that wrote it, with --clean."
        ) from None


def seal_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Write lines as `jsonl.gz`; equal lines give equal bytes (no name, no time in the gzip header)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=6) as file:
        file.writelines(redacted_bytes(line) + b"\n" for line in lines)
    write_sealed(path, buffer.getvalue())


def read_lines(path: Path) -> Iterator[Row]:
    """The rows of a sealed `jsonl.gz`; `BadInput` with the line number when it is truncated or malformed."""
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield orjson.loads(line)
                number += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(
            f"{path} is damaged after line {number} ({error}). "
            "Restore it, or delete its run folder and rerun the stage."
        ) from None
    except orjson.JSONDecodeError as error:
        raise BadInput(
            f"{path}, line {number + 1}, is not valid JSON ({error}). "
            "Restore it, or delete its run folder and rerun the stage."
        ) from None


def read_bytes(path: Path) -> bytes | None:
    """A whole file, or None when there is none."""
    return path.read_bytes() if path.is_file() else None


def read_units(folder: Path) -> list[Row]:
    """A journal's last record of every unit, without touching what another process may still be writing."""
    rows = [row for path in sorted(folder.glob("*.jsonl.gz")) for row in read_lines(path)]
    for path in sorted(folder.glob("*.jsonl.open")):
        whole = (read_bytes(path) or b"").rpartition(b"\n")[0]
        rows += [orjson.loads(line) for line in whole.splitlines()]
    return list({row["unit"]: row for row in rows}.values())


def write_table(path: Path, kind: Kind, rows: Iterable[Row]) -> Row:
    """Write rows as Parquet under the kind's declared schema; returns what the manifest keeps about it."""
    rows = [redacted_value(row) for row in rows]
    for row in rows:
        kind.check(row)
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=kind.schema)
    pq.write_table(table, sink, compression="zstd", row_group_size=8192)  # one rollout is found without all others
    write_sealed(path, sink.getvalue())
    content = digest([kind.stable(row) for row in rows])
    return {"kind": str(kind), "rows": len(rows), "sha256": file_sha256(path), "content_sha256": content}


def read_table(path: Path, kind: Kind) -> list[Row]:
    """The rows of a Parquet file that must be of this kind and not newer; `BadInput` says what it is otherwise."""
    found = parse_kind(table_kind(path), str(path))
    if found.name != kind.name:
        raise BadInput(
            f"{path} holds {found} records, but {kind} is needed here. Give the run that holds them with --from."
        )
    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(
            f"{path} cannot be read as Parquet ({error}). Delete its run folder and rerun the stage."
        ) from None


def table_kind(path: Path) -> str:
    """The `name/version` in a Parquet file's metadata; `BadInput` when it has none or is no Parquet file."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist. Rerun the stage that writes it.") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(
            f"{path} is not a readable Parquet file ({error}). Delete its run folder and rerun the stage."
        ) from None
    if b"composer.kind" not in metadata:
        raise BadInput(f"{path} was not written by Composer: its metadata names no record kind.")
    return metadata[b"composer.kind"].decode()


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines durably; on failure (a full disk) the file is cut back, so that no torn line stays in its middle."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        rest = memoryview(b"".join(line + b"\n" for line in lines))
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size)
            raise


class Journal:
    """Finished units of a stage, one line each, in files of `shard_size` lines: `000000.jsonl.gz`, ..., the last open.

    A line is durable once `append` returns. A unit written twice (a failure that was retried) counts with its last
    line.
    """

    def __init__(self, folder: Path, shard_size: int = 64) -> None:
        self.folder, self.shard_size = folder, shard_size
        folder.mkdir(parents=True, exist_ok=True)
        self._sealed = sorted(folder.glob("*.jsonl.gz"))
        self._lines = self._recover()
        self._latest = {record["unit"]: record for record in self._records()}

    @property
    def _open_path(self) -> Path:
        return self.folder / f"{len(self._sealed):06d}.jsonl.open"

    def _recover(self) -> list[bytes]:
        """The whole lines of the open file; a torn tail is cut off so that appending goes on cleanly."""
        for stale in set(self.folder.glob("*.open")) - {self._open_path}:
            stale.unlink()  # its sealed twin was renamed into place just before the process died
        if not self._open_path.exists():
            return []
        whole = self._open_path.read_bytes().rpartition(b"\n")[0]
        os.truncate(self._open_path, len(whole) + 1 if whole else 0)
        return whole.split(b"\n") if whole else []

    def _records(self) -> Iterator[Row]:
        for path in self._sealed:
            yield from read_lines(path)
        for line in self._lines:
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise BadInput(
                    f"{self._open_path} holds a malformed line ({error}). Delete that line, or start anew with --clean."
                ) from None

    def finished(self, unit: str) -> bool:
        """Whether a unit is done and did not fail."""
        return unit in self._latest and not self._latest[unit].get("failed", False)

    def get(self, unit: str) -> Row | None:
        """The last record of a unit, failed or not."""
        return self._latest.get(unit)

    def records(self) -> list[Row]:
        """The last record of every unit, in the order in which units were first written."""
        return list(self._latest.values())

    def append(self, units: Sequence[tuple[str, Mapping[str, Any], bool]]) -> None:
        """Make units durable, each (name, payload, failed). A payload may not use the keys `unit` and `failed`."""
        lines = [redacted_bytes(encode({"unit": unit, "failed": failed, **payload})) for unit, payload, failed in units]
        append_lines(self._open_path, lines)
        self._lines += lines
        self._latest |= {unit: orjson.loads(line) for (unit, _, _), line in zip(units, lines, strict=True)}
        if len(self._lines) >= self.shard_size:
            self.seal()

    def seal(self) -> None:
        """Turn the open file into a sealed one."""
        if not self._lines:
            return
        opened = self._open_path
        sealed = opened.with_name(f"{len(self._sealed):06d}.jsonl.gz")
        seal_lines(sealed, self._lines)
        opened.unlink(missing_ok=True)
        self._sealed.append(sealed)
        self._lines = []
