"""A table of a run for whoever computes further: as Arrow, as a DuckDB relation, as a pandas frame."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import duckdb
    import pandas


@dataclass(frozen=True)
class Scan:
    """One table, on disk until it is asked for."""

    path: Path

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
