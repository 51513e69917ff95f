"""Weights by name, as float32 arrays in the processor's memory: copies, a digest, fragments."""

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
"""float32, C-contiguous."""
Shapes = Mapping[str, tuple[int, ...]]


def copied(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of tensors of any device and type."""
    return {name: tensor.detach().to("cpu", torch.float32).numpy().copy() for name, tensor in tensors.items()}


def put(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
    """Write arrays into the tensors of the same names, in place."""
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(array))


def digest(arrays: Arrays) -> str:
    """SHA-256 over names, shapes and bytes, in hex."""
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name}{array.shape}".encode())
        found.update(array.astype("<f4", copy=False).tobytes())
    return found.hexdigest()


def shapes(arrays: Mapping[str, np.ndarray | Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each."""
    return {name: tuple(array.shape) for name, array in arrays.items()}


class Fragments:
    """Which weights each round is about: groups of about equal size in the order of names, one round after the other.

    There are at most `parts`, none is empty, and every name is in one.
    """

    def __init__(self, all_: Shapes, parts: int) -> None:
        self.all, done = dict(all_), 0
        total = sum(math.prod(shape) for shape in all_.values())
        groups: list[dict[str, tuple[int, ...]]] = [{} for _ in range(parts)]
        for name, shape in all_.items():
            size = math.prod(shape)
            groups[(done + size // 2) * parts // total if total else 0][name] = shape
            done += size
        self._groups = [group for group in groups if group]

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, round_: int) -> Shapes:
        """Names and shapes of a round's weights."""
        return self._groups[round_ % len(self._groups)]
