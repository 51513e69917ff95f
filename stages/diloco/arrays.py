"""Weights by name, as float32 arrays in the processor's memory: copies, a digest, fragments."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from stages.diloco.settings import Codec
from stages.errors import InfrastructureError
from stages.runs import store

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


# ---- outer
# The pseudo-gradient and the outer step.
#
# Every operation rounds as IEEE 754 says, none is fused by a compiler's choice, so that replicas on different machines
# compute the same bytes. They are those of `torch.optim.SGD(momentum, nesterov=True)` on float32, whose kernels
# compute
# a + b * c in one rounding: a product of two float32 is exact in float64.


def pseudo_gradient(start: Arrays, now: Arrays) -> Arrays:
    """How far inner steps went, with a gradient's sign: start - now, for the names of `now`."""
    return {name: start[name] - array for name, array in now.items()}


def nesterov(
    weights: Arrays, momentum: Arrays, gradient: Arrays, *, learning_rate: float, decay: float
) -> tuple[Arrays, Arrays]:
    """Weights and momentum after one step, for the names of `gradient`; momentum is zeros before the first.

    buffer = decay * buffer + gradient; weights -= learning_rate * (gradient + decay * buffer). Weights of 1 and a
    gradient of 0.1 become 0.867 at 0.7 and 0.9.
    """
    rate, kept = np.float32(learning_rate), np.float32(decay)
    new_weights, new_momentum = {}, {}
    for name, slope in gradient.items():
        buffer = kept * momentum[name] + slope
        new_momentum[name] = buffer
        new_weights[name] = _fused(weights[name], -rate, _fused(slope, kept, buffer))
    return new_weights, new_momentum


def _fused(a: np.ndarray, b: np.float32, c: np.ndarray) -> np.ndarray:
    """Give a + b * c in float32, rounded once."""
    return np.asarray(a.astype(np.float64) + np.float64(b) * c.astype(np.float64), dtype=np.float32)


def zeros(arrays: Arrays) -> Arrays:
    """Momentum before the first step."""
    return {name: np.zeros_like(array) for name, array in arrays.items()}


def mean(parts: list[Arrays]) -> Arrays:
    """The average, summed in the given order in float64, so that no order of arrival is seen in the result."""
    summed = {name: array.astype(np.float64) for name, array in parts[0].items()}
    for part in parts[1:]:
        for name, array in part.items():
            summed[name] += array
    return {name: np.asarray(array / len(parts), dtype=np.float32) for name, array in summed.items()}


def norm(arrays: Arrays) -> float:
    """The Euclidean norm over all of them."""
    return float(np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values())))


# ---- codec
# Arrays as bytes: float32, bfloat16, int8 or int4, and what rounding lost.
#
# int8 and int4 are symmetric, with one float32 scale for each `BLOCK` numbers of an array: 8.03 and 4.03 bits a
# number.

BLOCK = 1024
LEVELS = {"int8": 127, "int4": 7}
OF_MEAN: dict[Codec, Codec] = {"float32": "float32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
"""How the mean of a round travels: at int4 in int8, because nobody can send later what its rounding lost."""


def encode(arrays: Arrays, codec: Codec) -> bytes:
    """One array after the other. `InfrastructureError` where a number is not finite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise InfrastructureError(
                f"{name} is not finite after the inner steps: this replica has diverged. "
                "Lower optimisation.learning_rate or diloco.outer_learning_rate."
            )
    return b"".join(_encoded(array.ravel(), codec) for array in arrays.values())


def decode(data: bytes, shapes: Shapes, codec: Codec) -> Arrays:
    """Arrays of these shapes from `encode`'s bytes; `ValueError` where their number does not fit."""
    rest, arrays = memoryview(data), {}
    for name, shape in shapes.items():
        length = _size(math.prod(shape), codec)
        arrays[name] = _decoded(rest[:length], math.prod(shape), codec).reshape(shape)
        rest = rest[length:]
    if rest:
        raise ValueError(f"{len(rest)} bytes are too many")
    return arrays


def lost(arrays: Arrays, data: bytes, codec: Codec) -> Arrays:
    """What rounding took away: the arrays less what comes out of their bytes."""
    out = decode(data, {name: array.shape for name, array in arrays.items()}, codec)
    return {name: array - out[name] for name, array in arrays.items()}


def _size(count: int, codec: Codec) -> int:
    """Bytes of an array of so many numbers."""
    if codec in LEVELS:
        return 4 * math.ceil(count / BLOCK) + (count if codec == "int8" else math.ceil(count / 2))
    return count * (4 if codec == "float32" else 2)


def _encoded(flat: np.ndarray, codec: Codec) -> bytes:
    if codec == "float32":
        return flat.astype("<f4", copy=False).tobytes()
    if codec == "bf16":
        return torch.from_numpy(flat).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    blocks = np.zeros((math.ceil(flat.size / BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(LEVELS[codec])
    steps = np.divide(blocks, scales[:, None], out=np.zeros_like(blocks), where=scales[:, None] > 0)
    levels = np.clip(np.rint(steps), -LEVELS[codec], LEVELS[codec]).astype(np.int8).reshape(-1)[: flat.size]
    if codec == "int4":
        nibbles = np.zeros(2 * math.ceil(flat.size / 2), np.uint8)
        nibbles[: flat.size] = (levels + 8).astype(np.uint8)
        return scales.tobytes() + (nibbles[0::2] | nibbles[1::2] << 4).tobytes()
    return scales.tobytes() + levels.tobytes()


def _decoded(data: memoryview, count: int, codec: Codec) -> np.ndarray:
    if len(data) != _size(count, codec):
        raise ValueError(f"{_size(count, codec)} bytes are needed for {count} numbers, {len(data)} are left")
    if codec == "float32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if codec == "bf16":
        halves = np.frombuffer(data, np.int16).copy()
        return torch.from_numpy(halves).view(torch.bfloat16).float().numpy()
    blocks = math.ceil(count / BLOCK)
    scales, codes = np.frombuffer(data[: 4 * blocks], "<f4"), np.frombuffer(data[4 * blocks :], np.uint8)
    if codec == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:count]
        levels = codes.astype(np.float32) - 8
    else:
        levels = codes.view(np.int8).astype(np.float32)
    return levels * np.repeat(scales, BLOCK)[:count]


# ---- sealed
# Bytes with a digest in front, so that an object that is damaged or was written by half is known as one.


class Damaged(Exception):
    """An object is not what was written."""


def seal(header: dict[str, Any], payload: bytes) -> bytes:
    """SHA-256 of what follows (32 bytes), the header's length (4 bytes), the header as JSON, the payload."""
    told = store.encode(header)
    body = len(told).to_bytes(4, "little") + told + payload
    return hashlib.sha256(body).digest() + body


def unseal(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload; `Damaged` where they are not those that were sealed."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise Damaged(f"{len(data)} bytes with another digest than their own")
    end = 4 + int.from_bytes(body[:4], "little")
    return orjson.loads(body[4:end]), body[end:]
