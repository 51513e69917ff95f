"""Tables of a run as Parquet: written row by row, in row groups of bounded size, under a kind's declared schema.

Equal rows give equal bytes and digests, whether they come as a list, an iterator or record batches.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput
from stages.redaction import redacted_value
from stages.runs import store
from stages.runs.kinds import Kind
from stages.runs.records import Row, parse_kind
from stages.runs.scan import Scan

GROUP_ROWS = 8192
"""One rollout is found without all others."""
GROUP_BYTES = 32 * 1024 * 1024
"""Of text and numbers. A row group is held in memory by whoever writes or reads it."""


def write_table(path: Path, kind: Kind, rows: Iterable[Row | pa.RecordBatch]) -> Row:
    """Write rows; returns what the manifest keeps about them. `UsageError` where a row is not of this kind."""
    content, begun = hashlib.sha256(b"["), False

    def of_kind() -> Iterator[Row]:
        nonlocal begun
        for row in _single(rows):
            kind.check(row)
            row = redacted_value(row)
            content.update((b"," if begun else b"") + store.encode(kind.stable(row)))
            begun = True
            yield row

    with store.sealing(path) as file:
        number = write_rows(file, kind.schema, of_kind())
    content.update(b"]")
    told = {"kind": str(kind), "rows": number}
    return {**told, "sha256": store.file_sha256(path), "content_sha256": content.hexdigest()}


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Iterable[Row]) -> int:
    """Write rows of any schema, keys of servers redacted; returns how many they are."""
    number, group, size = 0, list[Row](), 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for row in rows:
            long = _size(row)
            if group and (len(group) == GROUP_ROWS or size + long > GROUP_BYTES):
                _write_group(writer, group)
                group, size = [], 0
            group.append(redacted_value(row))
            number, size = number + 1, size + long
        if group or number == 0:
            _write_group(writer, group)
    return number


def _size(value: Any) -> int:
    """About how many bytes a value takes: its text, and eight for everything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value)) if value and not isinstance(value[0], (int, float)) else 8 * len(value)
    return 8


def _single(rows: Iterable[Row | pa.RecordBatch]) -> Iterator[Row]:
    for one in rows:
        if isinstance(one, pa.RecordBatch):
            yield from one.to_pylist()
        else:
            yield one


def _write_group(writer: pq.ParquetWriter, rows: list[Row]) -> None:
    writer.write_table(pa.Table.from_pylist(rows, schema=writer.schema), row_group_size=max(len(rows), 1))


def scan_table(path: Path, kind: Kind) -> Scan:
    """A Parquet file that must be of this kind and not newer; `BadInput` says what it is otherwise."""
    found = parse_kind(table_kind(path), str(path))
    if found.name != kind.name:
        raise BadInput(
            f"{path} holds {found} records, but {kind} is needed here. Give the run that holds them with --from."
        )
    return Scan(path)


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
