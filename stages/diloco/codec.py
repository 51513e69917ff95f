"""Arrays as bytes: float32, bfloat16, int8 or int4, and what rounding lost.

int8 and int4 are symmetric, with one float32 scale for each `BLOCK` numbers of an array: 8.03 and 4.03 bits a number.
"""

import math

import numpy as np
import torch

from stages.diloco.arrays import Arrays, Shapes
from stages.diloco.settings import Codec
from stages.errors import InfrastructureError

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
