"""What goes over the wire: sizes, errors, and that nothing is lost for good."""

import numpy as np
import pytest
import torch

from stages.diloco import arrays
from stages.diloco.arrays import Damaged, seal, unseal
from stages.errors import InfrastructureError

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "a": RANDOM.standard_normal((33, 70)).astype(np.float32),
    "tiny": RANDOM.standard_normal(7).astype(np.float32) * 1e-6,
    "zero": np.zeros(1500, np.float32),
    "scalar": np.array(3.5, np.float32),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def back(kind: arrays.Codec) -> dict[str, np.ndarray]:
    return arrays.decode(arrays.encode(ARRAYS, kind), SHAPES, kind)


def test_float32_is_exact():
    assert all(np.array_equal(back("float32")[name], array) for name, array in ARRAYS.items())


def test_bf16_is_pytorchs():
    for name, array in ARRAYS.items():
        assert np.array_equal(back("bf16")[name], torch.from_numpy(array).to(torch.bfloat16).float().numpy())


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_integers_are_off_by_half_a_level_at_most(kind: arrays.Codec, levels: int):
    """Of each block's own scale, so that small arrays keep their digits beside large ones."""
    for name, array in ARRAYS.items():
        flat, got = array.ravel(), back(kind)[name].ravel()
        for start in range(0, flat.size, arrays.BLOCK):
            block = slice(start, start + arrays.BLOCK)
            allowed = np.abs(flat[block]).max() / levels / 2
            assert np.abs(flat[block] - got[block]).max() <= allowed * 1.0001


@pytest.mark.parametrize(
    ("kind", "bits"), [("float32", 32), ("bf16", 16), ("int8", 8 + 32 / 1024), ("int4", 4 + 32 / 1024)]
)
def test_bits_a_number(kind: arrays.Codec, bits: float):
    assert len(arrays.encode({"w": np.ones(2**20, np.float32)}, kind)) == 2**20 * bits / 8


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_error_feedback_loses_nothing_in_the_end(kind: arrays.Codec):
    """A slope too small for its block's levels arrives over many rounds; without feedback it never does at int4."""
    wanted = {"w": np.array([1.0, 0.013, -0.007], np.float32)}
    arrived, without, residual = np.zeros(3), np.zeros(3), np.zeros(3, np.float32)
    for _ in range(200):
        sent = {"w": wanted["w"] + residual}
        data = arrays.encode(sent, kind)
        residual = arrays.lost(sent, data, kind)["w"]
        arrived += arrays.decode(data, {"w": (3,)}, kind)["w"]
        without += arrays.decode(arrays.encode(wanted, kind), {"w": (3,)}, kind)["w"]
    assert np.abs(arrived / 200 - wanted["w"]).max() < 1e-3
    if kind == "int4":
        assert (without[1:] == 0).all()


def test_what_is_not_finite_is_refused():
    with pytest.raises(InfrastructureError, match="w is not finite after the inner steps"):
        arrays.encode({"w": np.array([1.0, np.nan], np.float32)}, "int8")


@pytest.mark.parametrize("kind", ["float32", "bf16", "int8", "int4"])
def test_bytes_of_another_size_are_refused(kind: arrays.Codec):
    data = arrays.encode(ARRAYS, kind)
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(ValueError, match="bytes are"):
            arrays.decode(wrong, SHAPES, kind)


def test_every_damage_to_sealed_bytes_is_noticed():
    sealed = seal({"round": 3}, b"payload")
    assert unseal(sealed) == ({"round": 3}, b"payload")
    for end in range(len(sealed)):
        with pytest.raises(Damaged):
            unseal(sealed[:end])
    for place in range(len(sealed)):
        with pytest.raises(Damaged):
            unseal(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :])
