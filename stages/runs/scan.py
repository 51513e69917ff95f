"""A table of a run for whoever computes further: row by row, in batches, as Arrow, DuckDB, or a pandas frame."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.errors import BadInput

if TYPE_CHECKING:
    import duckdb
    import pandas

BATCH_ROWS = 512
"""Rows that are Python objects at the same time."""


@dataclass(frozen=True)
class Scan:
    """One table, on disk until it is asked for."""

    path: Path

    def __len__(self) -> int:
        """The number of rows, without reading them."""
        return int(pq.read_metadata(self.path).num_rows)

    @property
    def columns(self) -> list[str]:
        """The names of its columns; a file of an older version may have others than its kind."""
        return list(pq.read_schema(self.path).names)

    def batches(self, columns: list[str] | None = None, size: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """All rows in order, or these columns of them, at most `size` at a time; `BadInput` where they are damaged."""
        try:
            with pq.ParquetFile(self.path, pre_buffer=False) as file:  # buffered, all that was read stays in memory
                yield from file.iter_batches(size, columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput(
                f"{self.path} cannot be read as Parquet ({error}). Delete its run folder and rerun the stage."
            ) from None

    def rows(self, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """The same one by one, each a dictionary."""
        return (row for batch in self.batches(columns) for row in batch.to_pylist())

    def arrow(self, columns: list[str] | None = None) -> pa.Table:
        """All rows, or these columns of them, as an Arrow table with the kind in its metadata."""
        return pq.ParquetFile(self.path).read(columns=columns)

    def duckdb(self, connection: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyRelation":
        """A relation to filter and join before anything is read: `scan.duckdb().filter("reward > 0")`."""
        import duckdb  # heavy, and most stages ask for rows alone

        return (connection or duckdb.connect()).read_parquet(str(self.path))

    def pandas(self, columns: list[str] | None = None) -> "pandas.DataFrame":
        """All rows, or these columns of them, as a frame; lists become arrays."""
        return self.arrow(columns).to_pandas()
