"""Tensors on disk: sealed safetensors files, and a matrix of rows that is mapped into memory.

The counterpart of `stages.runs.store` for tensors; nothing else in the probe opens a tensor file.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from stages.errors import BadInput
from stages.runs import store


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a whole safetensors file; equal tensors and metadata give equal bytes."""
    from safetensors.torch import save

    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    store.write_sealed(path, _with_metadata(save(on_cpu), metadata))


def _with_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Put metadata into the header of a safetensors file, sorted: the library's own order changes from call to call.

    The header is its length in eight bytes, then JSON, padded with spaces to a multiple of eight
    (huggingface/safetensors, README, "Format").
    """
    start = 8 + int.from_bytes(data[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **orjson.loads(data[8:start])}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; `BadInput` when it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{path} cannot be read as safetensors ({error}). Delete its run folder and rerun the stage."
        ) from None


class RowFile:
    """A [rows, width] matrix in one flat file, mapped into memory: any row is read or written without the rest."""

    def __init__(self, path: Path, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """Open the file, or create it filled with zeros; `BadInput` when it has another size."""
        self.path, size = path, rows * width * dtype.itemsize
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
        if path.stat().st_size != size:
            raise BadInput(
                f"{path} holds {path.stat().st_size} bytes, not the {size} of {rows} rows of {width} {dtype}."
            )
        self.rows: Float[Tensor, "rows width"] = (
            torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype).view(rows, width)
            if size
            else torch.zeros(rows, width, dtype=dtype)
        )

    def flush(self) -> None:
        """Make everything written so far durable."""
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())


def link_files(folder: Path, target: Path) -> None:
    """Give every file of a folder a second name in another folder of the same disk; nothing is copied."""
    for path in sorted(folder.iterdir()):
        os.link(path, target / path.name)
