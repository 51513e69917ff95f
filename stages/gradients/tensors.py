"""Flat vectors of trained numbers, and tensors on disk: safetensors files, and matrices of rows mapped into memory.

The counterpart of `composer_stages.runs.store`: nothing else in the probe opens a tensor file. Gradients are computed
once and kept; then every direction, placebo and loss weighting needs no model. At 4 B a number a row of Qwen3-4B takes
2.1 MB (534,528 numbers), half of it in bfloat16.

Shapes: B rows, N trainable numbers, n of a module, J modules.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.errors import BadInput
from composer_stages.runs import store

StoreType = Literal["float32", "bfloat16", "float16"]
ROWS, INDEX = "gradients.bin", "index.json"


class Layout:
    """The slices of modules in one flat vector of trainable numbers: names in order, each with its count of numbers.

    With one layout a gradient is one row of a matrix. `slices` has the slice of each name, `width` is N, the count of
    all numbers, `sha256` the digest of names and sizes in their order.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.names = sizes, tuple(sizes)
        self.slices: dict[str, slice] = {}
        self.width = 0
        for name, size in sizes.items():
            self.slices[name] = slice(self.width, self.width + size)
            self.width += size
        # A list of pairs, not an object: two layouts with the same sizes in another order are different coordinates.
        self.sha256 = store.digest(list(sizes.items()))

    def split(self, flat: Float[Tensor, "*rows N"]) -> dict[str, Float[Tensor, "*rows n"]]:
        """Return views of a flat tensor by name."""
        return {name: flat[..., columns] for name, columns in self.slices.items()}

    def only(self, flat: Float[Tensor, "*rows N"], *names: str) -> dict[str, Float[Tensor, "*rows n"]]:
        """Return views of a flat tensor for these names alone, those of them that the layout has."""
        return {name: flat[..., self.slices[name]] for name in names if name in self.slices}

    def join(self, parts: Mapping[str, Float[Tensor, "*rows n"]]) -> Float[Tensor, "*rows N"]:
        """Build one flat tensor from parts by name (at least one of them), zeros where a name is missing."""
        first = next(iter(parts.values()))
        flat = first.new_zeros(*first.shape[:-1], self.width)
        for name, part in parts.items():
            flat[..., self.slices[name]] = part
        return flat

    def sums(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """Return the sum over each name's numbers, in float32 at least."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        return torch.stack([part.sum(-1, dtype=wide) for part in self.split(flat).values()], dim=-1)

    def norms(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """Return the Euclidean norm of each name's numbers, in float32 at least."""
        wide, parts = torch.promote_types(flat.dtype, torch.float32), self.split(flat).values()
        return torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts], dim=-1)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; equal tensors and metadata give equal bytes."""
    from safetensors.torch import save

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})
    # The library's own order of metadata changes from call to call, so the sorted metadata is put into the header here:
    # its length in eight bytes, then JSON, padded with spaces to a multiple of eight (huggingface/safetensors, README,
    # "Format").
    start = 8 + int.from_bytes(data[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **orjson.loads(data[8:start])}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    store.write_sealed(path, len(text).to_bytes(8, "little") + text + data[start:])


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a safetensors file; `BadInput` when it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BadInput("gradients.tensors-unreadable", path=path, error=str(error)) from None


class RowFile:
    """A [rows, width] matrix in one flat file, mapped into memory: any row is read or written without the rest.

    Rows are reserved before they are written.
    """

    def __init__(self, path: Path, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """Open the file, or create it filled with zeros; `BadInput` when it has another size."""
        self.path, size = path, rows * width * dtype.itemsize
        if not path.exists():
            with store.sealing(path) as file:
                file.truncate(size)  # sparse: rows that are not reserved are zeros and take no space on disk
        if path.stat().st_size != size:
            raise BadInput(
                "gradients.row-file-size",
                path=path,
                size=path.stat().st_size,
                expected=size,
                rows=rows,
                width=width,
                dtype=str(dtype),
            )
        # An empty file cannot be mapped into memory.
        self.rows: Float[Tensor, "rows width"] = (
            torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype).view(rows, width)
            if size
            else torch.zeros(rows, width, dtype=dtype)
        )

    def reserve(self, start: int, count: int) -> None:
        """Allocate the disk blocks of rows; `OSError` on a full disk.

        Without it a write through the mapping to a full disk ends the process with SIGBUS.
        """
        width = self.rows.shape[1] * self.rows.itemsize
        if count * width:
            with self.path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), start * width, count * width)

    def flush(self) -> None:
        """Make all rows written so far durable."""
        # fsync of any descriptor of the file also writes the pages that a shared mapping has made dirty (Linux).
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over shapes, types and bytes, in hex."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Shape and type go in too: equal bytes may be another matrix. numpy has no bfloat16, hence the view as bytes.
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class GradientStore:
    """A [rows, N] matrix in a folder, with the layout of its columns and the settings that gave its rows.

    Row i of the file is the row whose `grad_store_offset` is i. `kept` is False where a replay kept sums alone, so that
    there are no rows; `file` is the matrix on disk.
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
            raise BadInput("gradients.store-of-other-rows", folder=folder)
        # The index is written before the file exists: an attempt killed in between leaves a store that opens empty.
        store.write_json(folder / INDEX, index)
        return cls(folder)

    @property
    def rows(self) -> Float[Tensor, "rows N"]:
        """All rows, in the type on disk; slices are read when they are used. `BadInput` where none was kept."""
        if not self.kept:
            raise BadInput("gradients.store-without-rows", folder=self.folder)
        return self.file.rows

    def put(self, start: int, gradients: Float[Tensor, "B N"]) -> None:
        """Write consecutive rows from number `start` on, durable after `file.flush()`; `OSError` on a full disk."""
        self.file.reserve(start, len(gradients))
        self.file.rows[start : start + len(gradients)] = gradients.to("cpu", self.file.rows.dtype)
