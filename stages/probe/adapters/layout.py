"""Where the trainable numbers of each module lie in one flat vector, so that a gradient is one row of a matrix.

Bookkeeping of this project's own.

Shapes: N numbers in all, n numbers of one module, J = number of modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from stages.runs import store


@dataclass(frozen=True)
class Layout:
    """Names in order, each with how many numbers it has."""

    sizes: Mapping[str, int]

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The place of each name in the flat vector."""
        slices, start = {}, 0
        for name, size in self.sizes.items():
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(self.sizes)

    @property
    def width(self) -> int:
        """N."""
        return sum(self.sizes.values())

    @property
    def sha256(self) -> str:
        """The digest of names and sizes in their order: other names, another order or other sizes give another."""
        return store.digest(list(self.sizes.items()))

    def split(self, flat: Float[Tensor, "*rows N"]) -> dict[str, Float[Tensor, "*rows n"]]:
        """Views of a flat tensor by name."""
        return {name: flat[..., place] for name, place in self.slices.items()}

    def join(self, parts: Mapping[str, Float[Tensor, "*rows n"]]) -> Float[Tensor, "*rows N"]:
        """One flat tensor from parts by name (at least one of them), zeros where a name is missing."""
        first = next(iter(parts.values()))
        flat = first.new_zeros(*first.shape[:-1], self.width)
        for name, part in parts.items():
            flat[..., self.slices[name]] = part
        return flat

    def sums(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """The sum over each name's numbers, in float32 at least."""
        return torch.stack([part.sum(-1, dtype=_wide(flat)) for part in self.split(flat).values()], dim=-1)

    def norms(self, flat: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows J"]:
        """The Euclidean norm of each name's numbers, in float32 at least."""
        parts = self.split(flat).values()
        return torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=_wide(flat)) for part in parts], dim=-1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
