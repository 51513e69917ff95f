"""Singular value decompositions of the adapted Linears with the digest that identifies them, and tensors on disk.

A direction in singular coordinates means nothing in those of another decomposition: inside nearly degenerate subspaces
two decompositions may choose different axes. So a decomposition is made once, stored, and identified by its digest;
what was measured in it carries that digest. The decomposition is torch.linalg.svd's; that v is bound to a stored one is
this project's own.

Tensor files are the counterpart of `stages.runs.store`: sealed safetensors files, and a matrix of rows that is mapped
into memory. Nothing else in the probe opens a tensor file.

Shapes: I inputs and O outputs of a Linear, r singular directions.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from stages.errors import BadInput
from stages.runs import store


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
        raise BadInput(
            f"{path} cannot be read as safetensors ({error}). Delete its run folder and rerun the stage."
        ) from None


class RowFile:
    """A [rows, width] matrix in one flat file, mapped into memory: any row is read or written without the rest.

    Rows are reserved before they are written.
    """

    def __init__(self, path: Path, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        """Open the file, or create it filled with zeros; `BadInput` when it has another size."""
        self.path, size = path, rows * width * dtype.itemsize
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size)  # sparse: rows that are not reserved are zeros and take no space on disk
        if path.stat().st_size != size:
            raise BadInput(
                f"{path} holds {path.stat().st_size} bytes, not the {size} of {rows} rows of {width} {dtype}."
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


def link_files(folder: Path, target: Path) -> None:
    """Hard-link every file of a folder into another folder of the same disk; nothing is copied."""
    for path in sorted(folder.iterdir()):
        os.link(path, target / path.name)


@dataclass(frozen=True)
class Factors:
    """W = U diag(S) Vh of one Linear: U [O, r], S [r] descending, Vh [r, I], r = min(O, I), float32."""

    U: Float[Tensor, "O r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r I"]

    def select(self, dims: Sequence[int]) -> "Factors":
        """Select these singular triples."""
        chosen = list(dims)
        return Factors(self.U[:, chosen].contiguous(), self.S[chosen].contiguous(), self.Vh[chosen].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Factors":
        """Copy the factors to a device and type."""
        return Factors(*(part.to(device, dtype) for part in (self.U, self.S, self.Vh)))

    @cached_property
    def sha256(self) -> str:
        """The digest of the three tensors, in hex."""
        return tensors_sha256([self.U, self.S, self.Vh])


@dataclass(frozen=True)
class Spectrum:
    """The factors of every adapted Linear, by module name."""

    factors: Mapping[str, Factors]

    @cached_property
    def sha256(self) -> str:
        """The digest of module names and their factors in order, in hex, which identifies this decomposition."""
        return store.digest([[name, factors.sha256] for name, factors in self.factors.items()])


def factorise(weight: Float[Tensor, "O I"], dtype: torch.dtype = torch.float32) -> Factors:
    """Decompose a weight in `dtype` (float32 or float64); the factors are float32 either way."""
    # Joint sign flips of (u, v) leave dS unchanged, rotations inside nearly degenerate subspaces do not. Gradients of a
    # float64 decomposition keep a cosine of .9999999 with those of a float32 one (widths 512 to 1,024); after a change
    # of W as large as bfloat16's rounding it is .994 to .998.
    U, S, Vh = torch.linalg.svd(weight.detach().to(dtype), full_matrices=False)
    return Factors(*(part.to(torch.float32).contiguous() for part in (U, S, Vh)))


def reconstruction_error(weight: Float[Tensor, "O I"], factors: Factors) -> float:
    """Compute ||W - U diag(S) Vh|| / ||W|| in Frobenius norms, in float32."""
    exact = weight.detach().float()
    rebuilt = (factors.U * factors.S) @ factors.Vh
    return float(torch.linalg.norm(exact - rebuilt) / torch.linalg.norm(exact))


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over shapes, types and bytes, in hex."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Shape and type go in too: equal bytes may be another matrix. numpy has no bfloat16, hence the view as bytes.
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_factors(path: Path, name: str, factors: Factors) -> None:
    """Write one module's factors as safetensors, with its name and digest in the metadata."""
    metadata = {"module": name, "sha256": factors.sha256}
    write_tensors(path, {"U": factors.U, "S": factors.S, "Vh": factors.Vh}, metadata)


def load_spectrum(folder: Path) -> Spectrum:
    """Load the decomposition in a folder of factor files, in the order of the model's modules.

    `BadInput` when a file's tensors do not match the digest in that file.
    """
    loaded = {}
    # Files are numbered in the model's order, so that sorted names restore the order of modules.
    for path in sorted(folder.glob("*.safetensors")):
        tensors, metadata = read_tensors(path)
        factors = Factors(tensors["U"], tensors["S"], tensors["Vh"])
        if factors.sha256 != metadata["sha256"]:
            raise BadInput(
                f"{path} does not hold the decomposition it names. "
                "Delete its run folder and rerun `composer probe svd`."
            )
        loaded[metadata["module"]] = factors
    return Spectrum(loaded)
