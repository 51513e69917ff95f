"""Token-sum gradients of many rows on disk, mapped into memory.

Gradients are computed once; then every direction, placebo and loss weighting needs no model. Row i of the file is the
row whose `grad_store_offset` is i. At 4 B a number a row of Qwen3-4B takes 2.1 MB (534,528 numbers), half of it in
bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from stages.errors import BadInput
from stages.probe.adapters.attach import Layout
from stages.probe.adapters.spectrum import RowFile
from stages.runs import store

StoreType = Literal["float32", "bfloat16", "float16"]
ROWS, INDEX = "gradients.bin", "index.json"


class GradientStore:
    """A [rows, N] matrix in a folder, with the layout of its columns and the settings that gave its rows.

    `kept` is False where a replay kept sums alone, so that there are no rows; `file` is the matrix on disk.
    """

    def __init__(self, folder: Path) -> None:
        """Open an existing store; `BadInput` when its index is missing or its file has another size."""
        index = store.read_json(folder / INDEX)
        self.folder, self.layout, self.facts = folder, Layout(dict(index["layout"])), index["facts"]
        self.file = RowFile(folder / ROWS, index["rows"], self.layout.width, getattr(torch, index["dtype"]))
        self.kept = len(self.file.rows) > 0

    @classmethod
    def create(
        cls, folder: Path, layout: Layout, rows: int, facts: Mapping[str, Any], dtype: StoreType = "float32"
    ) -> "GradientStore":
        """Open a store of `rows` rows for writing, or the one of an earlier attempt.

        `BadInput` when the latter has another layout, number of rows, type or `facts`.
        """
        index = {"layout": list(layout.sizes.items()), "rows": rows, "dtype": dtype, "facts": dict(facts)}
        if (folder / INDEX).exists() and store.digest(store.read_json(folder / INDEX)) != store.digest(index):
            raise BadInput(f"{folder} holds gradients of something else. Start anew with --clean.")
        # The index is written before the file exists: an attempt killed in between leaves a store that opens empty.
        store.write_json(folder / INDEX, index)
        return cls(folder)

    @property
    def rows(self) -> Float[Tensor, "rows N"]:
        """All rows, in the type on disk; slices are read when they are used. `BadInput` where none was kept."""
        if not self.kept:
            raise BadInput(
                f"{self.folder} holds no gradients, because its replay kept sums alone. Replay with --set keep=rows."
            )
        return self.file.rows

    def put(self, start: int, gradients: Float[Tensor, "B N"]) -> None:
        """Write consecutive rows from number `start` on, durable after `file.flush()`; `OSError` on a full disk."""
        self.file.reserve(start, len(gradients))
        self.file.rows[start : start + len(gradients)] = gradients.to("cpu", self.file.rows.dtype)
