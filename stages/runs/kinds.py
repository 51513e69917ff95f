"""What a record kind is: a named, versioned row type with an explicit Arrow schema.

A kind is written `name/version`, for example `pair/1`. Columns in `wall` depend on wall time or the machine; they are
kept, but do not enter a table's content digest, so that rerunning a stage on the same inputs gives the same digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from stages.errors import UsageError

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TOKENS, LOGPROBS, TEXTS = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.string())


@dataclass(frozen=True)
class Kind:
    """A row type: its name, version, columns in order, and which of them depend on wall time."""

    name: str
    version: int
    columns: Mapping[str, pa.DataType]
    wall: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, kind and version in its key-value metadata."""
        return pa.schema(list(self.columns.items()), metadata={"composer.kind": str(self)})

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise `UsageError` when a row has not exactly the kind's columns, which Arrow would drop or null silently."""
        if row.keys() != self.columns.keys():
            missing, extra = self.columns.keys() - row.keys(), row.keys() - self.columns.keys()
            raise UsageError(f"A {self} row does not fit: missing {sorted(missing)}, unknown {sorted(extra)}.")

    def stable(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row without its wall-time columns."""
        return {name: row[name] for name in self.columns if name not in self.wall}
