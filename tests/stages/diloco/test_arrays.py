"""What goes over the wire loses nothing for good; the outer step is PyTorch's; fragments; settings."""

import numpy as np
import pytest
import torch

from composer_stages.diloco import arrays
from composer_stages.diloco.arrays import Damaged, Fragments, digest, mean, nesterov, seal, unseal
from composer_stages.diloco.settings import Diloco
from composer_stages.errors import InfrastructureError

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


def test_float32_is_exact_and_bf16_is_pytorchs():
    for name, array in ARRAYS.items():
        half = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
        assert np.array_equal(back("float32")[name], array) and np.array_equal(back("bf16")[name], half)


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


def test_values_that_are_not_finite_are_refused():
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


# Sign, Nesterov, mean and fragments, against PyTorch's own optimiser and by definition.


@pytest.mark.parametrize(("rate", "decay"), [(0.7, 0.9), (0.9, 0.5), (0.5, 0.8), (1.0, 0.9)])
def test_steps_are_pytorchs(rate: float, decay: float):
    """But for a rounding of each step: a processor without fused multiply-add rounds PyTorch's twice."""
    torch.manual_seed(0)
    start = torch.randn(20_011)
    parameter = torch.nn.Parameter(start.clone())
    upstream = torch.optim.SGD([parameter], lr=rate, momentum=decay, nesterov=True)
    weights = {"w": start.numpy().copy()}
    momentum = {"w": np.zeros_like(weights["w"])}
    for _ in range(12):
        parameter.grad = torch.randn(20_011) / 10
        upstream.step()
        gradient = {"w": parameter.grad.numpy()}
        weights, momentum = nesterov(weights, momentum, gradient, learning_rate=rate, decay=decay)
    rounding = 12 * torch.finfo(torch.float32).eps * float(parameter.detach().abs().max())
    torch.testing.assert_close(torch.from_numpy(weights["w"]), parameter.detach(), rtol=0, atol=rounding)


def test_steps_have_the_same_bytes_on_every_machine():
    """Of numbers that are exact in float32: the digest was the same with the instructions of SSE, AVX2 and AVX-512."""
    drawn = np.random.default_rng(0).integers(-(2**20), 2**20, (5, 20_011)) / 2**18
    start, *gradients = ({"w": row.astype(np.float32)} for row in drawn)
    weights, momentum = start, {"w": np.zeros_like(start["w"])}
    for gradient in gradients:
        weights, momentum = nesterov(weights, momentum, gradient, learning_rate=0.7, decay=0.9)
    assert digest({"w": weights["w"], "m": momentum["w"]}) == (
        "c8d267c53d272d797d29084f696fc1692d73a8a0dd0e54d829bf8d29dd890f3a"
    )


def test_the_mean_is_independent_of_the_order_of_arrival():
    """Sums in float32 do, in most elements; sums in float64, rounded once, in none."""
    random = np.random.default_rng(0)
    parts = [{"w": random.standard_normal(10_000).astype(np.float32)} for _ in range(8)]
    backwards = parts[::-1]
    assert np.array_equal(mean(parts)["w"], mean(backwards)["w"])
    narrow = [sum((part["w"] for part in order[1:]), order[0]["w"]) for order in (parts, backwards)]
    assert (narrow[0] != narrow[1]).mean() > 0.3


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_fragments_hold_every_name_once_and_are_of_about_equal_size(parts: int):
    sizes = {"a": (100,), "b": (1,), "c": (10, 5), "d": (49,), "e": (2, 2)}
    found = Fragments(sizes, parts)
    names = [name for round_ in range(len(found)) for name in found.round_shapes(round_)]
    assert names == list(sizes) and len(found) <= parts
    assert found.round_shapes(0) == found.round_shapes(len(found))
    halves = Fragments({f"layer{i}": (10, 10) for i in range(8)}, 2)
    assert [len(halves.round_shapes(i)) for i in range(2)] == [4, 4]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner_steps": 10, "fragments": 3}, "3 fragments do not divide"),
        ({"replicas": 2, "quorum": 3}, "more than the 2 replicas"),
        ({"store": "s3://key:secret@bucket/run"}, "put keys into the environment"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Diloco(**settings)
