"""Tables of a run as Parquet: written in row groups of bounded size under a kind's schema, read lazily by `Scan`.

Equal rows give equal bytes and digests, whether they come as a list, an iterator or record batches.
"""

import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from composer_stages.errors import BadInput, UsageError
from composer_stages.redaction import redacted_value
from composer_stages.runs import display, store
from composer_stages.runs.kinds import Kind, Row, parse_kind

if TYPE_CHECKING:
    import duckdb
    import pandas


BATCH_ROWS = 512
"""Rows that exist as Python objects at the same time, in reading and in writing."""
MEMORY = "200MB"
"""Memory of DuckDB before it sorts on disk."""

Columns: TypeAlias = Sequence[str] | str | None
ArrowTable: TypeAlias = pa.Table
"""Names of columns, or one name; None for all columns."""


@dataclass(frozen=True, repr=False)
class Scan:
    """One table on disk, to be read row by row, in batches, as Arrow, with DuckDB, or as a pandas frame.

    `columns`, where a method takes it, are the names of those to read, or one name; without it, all.

    >>> steps = composer.find("collect").scan("steps")
    >>> steps.arrow(["task_id", "step"]).num_rows == len(steps)
    True
    """

    path: Path
    """The Parquet file."""

    def __repr__(self) -> str:
        return repr(display.of_scan(self))

    def _repr_html_(self) -> str:
        return display.of_scan(self)._repr_html_()

    def __len__(self) -> int:
        """Return the number of rows without reading them."""
        return int(pq.read_metadata(self.path).num_rows)

    @property
    def columns(self) -> list[str]:
        """Return the column names."""
        return list(pq.read_schema(self.path).names)

    @property
    def kind(self) -> str:
        """Return the name of the rows' kind, such as `rollout`; empty for a file of another program."""
        metadata = pq.read_schema(self.path).metadata or {}
        return metadata.get(b"composer.kind", b"").decode().partition("/")[0]

    def batches(self, columns: Columns = None, size: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, or these columns of them, `size` at a time.

        Raises `BadInput` for a damaged file, `UsageError` for a column that there is not, which Arrow would leave out.
        """
        try:
            # With pre_buffer, its default, pyarrow keeps all it has read in memory: 1 GB for a million steps.
            with pq.ParquetFile(self.path, pre_buffer=False) as file:
                yield from file.iter_batches(size, columns=self._checked(columns, file))
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput("runs.table-unreadable", path=self.path, error=error) from None

    def rows(self, columns: Columns = None) -> Iterator[dict[str, Any]]:
        """Yield all rows, or these columns of them, as dictionaries; raises as `batches` does."""
        return (row for batch in self.batches(columns) for row in batch.to_pylist())

    def arrow(self, columns: Columns = None) -> pa.Table:
        """Read all rows, or these columns of them, as an Arrow table with the kind in its metadata.

        Raises `UsageError` for a column that there is not.
        """
        file = pq.ParquetFile(self.path)
        return file.read(columns=self._checked(columns, file))

    def _checked(self, columns: Columns, file: pq.ParquetFile) -> list[str] | None:
        """Return these columns as a list, one name as a list of one; `UsageError` for one that there is not."""
        names = [columns] if isinstance(columns, str) else columns
        present = file.schema_arrow.names
        if absent := [name for name in names or () if name not in present]:
            raise UsageError("runs.no-column", stem=self.path.stem, absent=absent[0], known=present)
        return None if names is None else list(names)

    def duckdb(self, connection: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyRelation":
        """Return a DuckDB relation to filter and join before reading: `scan.duckdb().filter("reward > 0")`."""
        import duckdb  # slow to import, and most stages need rows alone

        return (connection or duckdb.connect()).read_parquet(str(self.path))

    def pandas(self, columns: Columns = None) -> "pandas.DataFrame":
        """Read all rows, or these columns of them, as a pandas frame; lists become arrays."""
        return self.arrow(columns).to_pandas()


GROUP_ROWS = 8192
"""Most rows of a row group, so that one rollout is read without all others."""
GROUP_BYTES = 32 * 1024 * 1024
"""Most bytes of a row group, which is held in memory when it is written or read."""


def write_table(path: Path, kind: Kind, rows: Iterable[Row | pa.RecordBatch]) -> Row:
    """Write rows and return the table's manifest entry; `UsageError` for a row that is not of this kind."""
    # The content digest is that of the JSON array of all rows, hashed batch by batch: [1:-1] strips each batch's
    # brackets. It is independent of row groups and of the Parquet library's version, unlike the digest of the file.
    content, separator = hashlib.sha256(b"["), b""

    def hashed() -> Iterator[pa.RecordBatch]:
        nonlocal separator
        for batch, batch_rows in _batches(rows, kind.schema, kind.check):
            content.update(separator + store.encode([kind.stable(row) for row in batch_rows])[1:-1])
            separator = b","
            yield batch

    with store.sealing(path) as file:
        number = _write(file, kind.schema, hashed())
    content.update(b"]")
    digests = {"sha256": store.file_sha256(path), "content_sha256": content.hexdigest()}
    return {"kind": str(kind), "rows": number, **digests}


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Iterable[Row]) -> int:
    """Write rows of any schema with API keys redacted; return their number."""
    return _write(file, schema, (batch for batch, _ in _batches(rows, schema, lambda row: None)))


def _batches(
    rows: Iterable[Row | pa.RecordBatch], schema: pa.Schema, check: Callable[[Row], None]
) -> Iterator[tuple[pa.RecordBatch, list[Row]]]:
    """Yield rows in small batches, as Arrow and as Python objects, both with API keys redacted."""
    for part in _parts(rows):
        rows_of_part = part.to_pylist() if isinstance(part, pa.RecordBatch) else part
        for row in rows_of_part:
            check(row)
        clean = redacted_value(
            rows_of_part
        )  # the same object where nothing was redacted: the batch is then written as it is
        as_given = isinstance(part, pa.RecordBatch) and clean is rows_of_part
        yield part if as_given else pa.RecordBatch.from_pylist(clean, schema=schema), clean


def _parts(rows: Iterable[Row | pa.RecordBatch]) -> Iterator[list[Row] | pa.RecordBatch]:
    """Yield record batches in slices and rows in lists, of at most `BATCH_ROWS`; fewer where rows are long."""
    batch, size = list[Row](), 0
    for row in rows:
        if isinstance(row, pa.RecordBatch):
            if batch:
                yield batch
            batch, size = [], 0
            yield from (row.slice(at, BATCH_ROWS) for at in range(0, len(row), BATCH_ROWS))
            continue
        batch.append(row)
        size += _size(row)
        if len(batch) == BATCH_ROWS or size > GROUP_BYTES // 8:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(file: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write row groups of at most `GROUP_ROWS` and `GROUP_BYTES`; return the number of rows.

    Where a group ends depends on the rows alone and not on the batches, so that equal rows give equal bytes.
    """
    number, group, rows, size = 0, list[pa.RecordBatch](), 0, 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in batches:
            begin = 0
            for at, long in enumerate(_sizes(batch)):
                if rows and (rows == GROUP_ROWS or size + long > GROUP_BYTES):
                    _write_group(writer, [*group, batch.slice(begin, at - begin)])
                    group, begin, rows, size = [], at, 0, 0
                rows, size = rows + 1, size + long
            group.append(batch.slice(begin))
            number += len(batch)
        if rows or number == 0:  # a table without rows has one empty group, and so a schema
            _write_group(writer, group)
    return number


def _sizes(batch: pa.RecordBatch) -> list[int]:
    """Return the size of each row in bytes, as `_size` estimates it; computed by Arrow where the type allows."""
    total = pa.array([0] * len(batch), pa.int64())
    for column in batch.columns:
        kind = column.type
        if pa.types.is_string(kind):
            sizes = pc.utf8_length(column).fill_null(8)
        elif not pa.types.is_nested(kind):
            sizes = pa.array([8] * len(column))
        elif pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
            sizes = pc.multiply(pc.list_value_length(column), 8).fill_null(8)
        else:
            sizes = pa.array([_size(value) for value in column.to_pylist()], pa.int64())
        total = pc.add(total, sizes.cast(pa.int64()))
    lengths: list[int] = total.to_pylist()
    return lengths


def _size(value: Any) -> int:
    """Estimate the bytes of a value: the length of text, and eight for everything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value)) if value and not isinstance(value[0], (int, float)) else 8 * len(value)
    return 8


def _write_group(writer: pq.ParquetWriter, batches: list[pa.RecordBatch]) -> None:
    # combine_chunks(): the bytes would otherwise depend on how the rows were batched.
    table = pa.Table.from_batches(batches, schema=writer.schema).combine_chunks()
    writer.write_table(table, row_group_size=max(len(table), 1))  # pyarrow refuses groups of 0 rows


def scan_table(path: Path, kind: Kind) -> Scan:
    """Open a Parquet file of this kind; `BadInput` for another kind, a newer version, or a file of another program."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except FileNotFoundError:
        raise BadInput("runs.table-missing", path=path) from None
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput("runs.parquet-damaged", path=path, error=error) from None
    if b"composer.kind" not in metadata:
        raise BadInput("runs.not-by-composer", path=path)
    record_kind = parse_kind(metadata[b"composer.kind"].decode(), str(path))
    if record_kind.name != kind.name:
        raise BadInput("runs.records-of-other-kind", path=path, found=record_kind, kind=kind)
    return Scan(path)


def open_database(folder: Path, memory: str = MEMORY, **tables: Scan) -> "duckdb.DuckDBPyConnection":
    """Open a DuckDB database in `folder` with these tables as views, which also have `file_row_number`."""
    import duckdb  # slow to import, and few commands need it

    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory,
        # A second thread saves a third of the time to join, and takes half as much processor time and memory again.
        "threads": 1,
        # What is stored is temporary: compressing it is not worth the time.
        "force_compression": "uncompressed",
        "temp_directory": str(folder / "spilled"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.duckdb").unlink(missing_ok=True)
    database = duckdb.connect(str(folder / "rows.duckdb"), config=settings)
    for name, table in tables.items():
        database.execute(f"CREATE VIEW {name} AS SELECT * FROM {parquet(table.path)}")  # noqa: S608
    return database


def parquet(path: Path) -> str:
    """Return a file as a table in SQL, with the column `file_row_number`."""
    return f"read_parquet({store.in_sql(path)}, file_row_number = true)"


def rows_of(database: "duckdb.DuckDBPyConnection", query: str) -> Generator[Row, None, None]:
    """Yield the rows of a query, one after the other."""
    # A cursor of its own: a connection has one result at a time, and steps and answers are read side by side.
    with database.cursor() as cursor:
        for batch in cursor.sql(query).to_arrow_reader(BATCH_ROWS):
            yield from batch.to_pylist()


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """Return a table with these values in one of its columns."""
    return table.set_column(table.schema.get_field_index(name), name, values)


def leave_pandas_out() -> None:
    """Have Arrow ask for pandas now, and not find it: to import it takes longer than to compare two logs or to vote.

    Arrow asks once, for arrays that are of pandas; its `to_pandas` asks again. For processes that make none such.
    """

    class Absent(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            if fullname == "pandas":
                raise ModuleNotFoundError(name=fullname)

    sys.meta_path.insert(0, absent := Absent())
    pa.array([None])
    sys.meta_path.remove(absent)
