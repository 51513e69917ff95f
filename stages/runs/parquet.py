"""Tables of a run as Parquet: written row by row, in row groups of bounded size, under a kind's declared schema.

Equal rows give equal bytes and digests, whether they come as a list, an iterator or record batches.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

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
"""Of rows as JSON. A row group is held in memory by whoever writes or reads it."""


def write_table(path: Path, kind: Kind, rows: Iterable[Row | pa.RecordBatch]) -> Row:
    """Write rows; returns what the manifest keeps about them. `UsageError` where a row is not of this kind."""
    content, number = hashlib.sha256(b"["), 0
    with store.sealing(path) as file, pq.ParquetWriter(file, kind.schema, compression="zstd") as writer:
        group, size = list[Row](), 0
        for row in _single(rows):
            row = redacted_value(row)
            kind.check(row)
            encoded = store.encode(kind.stable(row))
            content.update(encoded if number == 0 else b"," + encoded)
            number += 1
            if group and (len(group) == GROUP_ROWS or size + len(encoded) > GROUP_BYTES):
                _write_group(writer, group)
                group, size = [], 0
            group.append(row)
            size += len(encoded)
        if group or number == 0:
            _write_group(writer, group)
    content.update(b"]")
    told = {"kind": str(kind), "rows": number}
    return {**told, "sha256": store.file_sha256(path), "content_sha256": content.hexdigest()}


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
