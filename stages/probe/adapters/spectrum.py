"""Singular value decompositions of the adapted Linears, and the digest that ties what is measured in them to them.

A direction in singular coordinates means nothing in those of another decomposition: inside nearly degenerate subspaces
two decompositions may choose different axes. So a decomposition is made once, stored, and identified by its digest;
what was measured in it carries that digest. The decomposition is torch.linalg.svd's; that v is bound to a stored one is
this project's own.

Shapes: I inputs and O outputs of a Linear, r singular directions.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from stages.errors import BadInput
from stages.probe.adapters.tensor_file import read_tensors, write_tensors
from stages.runs import store


@dataclass(frozen=True)
class Factors:
    """W = U diag(S) Vh of one Linear: U [O, r], S [r] descending, Vh [r, I], r = min(O, I), float32."""

    U: Float[Tensor, "O r"]
    S: Float[Tensor, " r"]
    Vh: Float[Tensor, "r I"]

    def top(self, rank: int) -> "Factors":
        """The largest `rank` singular triples."""
        return Factors(self.U[:, :rank].contiguous(), self.S[:rank].contiguous(), self.Vh[:rank].contiguous())

    def of(self, dims: Sequence[int]) -> "Factors":
        """These singular triples."""
        chosen = list(dims)
        return Factors(self.U[:, chosen].contiguous(), self.S[chosen].contiguous(), self.Vh[chosen].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Factors":
        """On another device, in another type."""
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
        """The digest of module names and their factors in order, in hex: what identifies this decomposition."""
        return store.digest([[name, factors.sha256] for name, factors in self.factors.items()])


def factorise(weight: Float[Tensor, "O I"], dtype: torch.dtype = torch.float32) -> Factors:
    """Decompose a weight in `dtype` (float32 or float64); the factors are float32 either way."""
    U, S, Vh = torch.linalg.svd(weight.detach().to(dtype), full_matrices=False)
    return Factors(*(part.to(torch.float32).contiguous() for part in (U, S, Vh)))


def reconstruction_error(weight: Float[Tensor, "O I"], factors: Factors) -> float:
    """||W - U diag(S) Vh|| / ||W|| in Frobenius norms, computed in float32."""
    exact = weight.detach().float()
    rebuilt = (factors.U * factors.S) @ factors.Vh
    return float(torch.linalg.norm(exact - rebuilt) / torch.linalg.norm(exact))


def tensors_sha256(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over shapes, types and bytes, in hex."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_factors(path: Path, name: str, factors: Factors) -> None:
    """Write one module's factors as safetensors, with its name and digest in the metadata."""
    metadata = {"module": name, "sha256": factors.sha256}
    write_tensors(path, {"U": factors.U, "S": factors.S, "Vh": factors.Vh}, metadata)


def load_factors(path: Path) -> tuple[str, Factors]:
    """Module name and factors; `BadInput` when the tensors are not those whose digest the file names."""
    tensors, metadata = read_tensors(path)
    factors = Factors(tensors["U"], tensors["S"], tensors["Vh"])
    if factors.sha256 != metadata["sha256"]:
        raise BadInput(
            f"{path} does not hold the decomposition it names. Delete its run folder and rerun `composer probe svd`."
        )
    return metadata["module"], factors


def load_spectrum(folder: Path) -> Spectrum:
    """The decomposition that a folder of factor files holds, in the order of the model's modules."""
    return Spectrum(dict(load_factors(path) for path in sorted(folder.glob("*.safetensors"))))
