"""Sign, Nesterov, mean and fragments against PyTorch's own optimiser and by definition."""

import numpy as np
import pytest
import torch

from stages.diloco import arrays
from stages.diloco.arrays import Fragments, mean, nesterov, pseudo_gradient
from stages.diloco.settings import Diloco


def one(value: float) -> arrays.Arrays:
    return {"w": np.array([value], np.float32)}


def test_the_pseudo_gradient_has_a_gradients_sign():
    """An outer step of rate 1 without momentum lands where the inner steps did."""
    gradient = pseudo_gradient(one(1.0), one(0.75))
    assert gradient["w"][0] == 0.25
    landed, _ = nesterov(one(1.0), one(0.0), gradient, learning_rate=1.0, decay=0.0)
    assert landed["w"][0] == 0.75


def test_the_first_step_of_the_papers_settings():
    landed, momentum = nesterov(one(1.0), one(0.0), one(0.1), learning_rate=0.7, decay=0.9)
    assert landed["w"][0] == pytest.approx(0.867, abs=1e-7)
    assert momentum["w"][0] == np.float32(0.1)


@pytest.mark.parametrize(("rate", "decay"), [(0.7, 0.9), (0.9, 0.5), (0.5, 0.8), (1.0, 0.9)])
def test_steps_equal_pytorchs_to_the_last_bit(rate: float, decay: float):
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
        assert torch.equal(parameter.detach(), torch.from_numpy(weights["w"]))


def test_the_mean_does_not_depend_on_who_came_first():
    """Sums in float32 do, in most elements; sums in float64, rounded once, in none."""
    random = np.random.default_rng(0)
    parts = [{"w": random.standard_normal(10_000).astype(np.float32)} for _ in range(8)]
    backwards = parts[::-1]
    assert np.array_equal(mean(parts)["w"], mean(backwards)["w"])
    narrow = [sum((part["w"] for part in order[1:]), order[0]["w"]) for order in (parts, backwards)]
    assert (narrow[0] != narrow[1]).mean() > 0.3


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_fragments_hold_every_name_once(parts: int):
    sizes = {"a": (100,), "b": (1,), "c": (10, 5), "d": (49,), "e": (2, 2)}
    found = Fragments(sizes, parts)
    names = [name for round_ in range(len(found)) for name in found.of(round_)]
    assert names == list(sizes) and len(found) <= parts
    assert found.of(0) == found.of(len(found))


def test_two_fragments_are_of_about_equal_size():
    found = Fragments({f"layer{i}": (10, 10) for i in range(8)}, 2)
    assert [len(found.of(i)) for i in range(2)] == [4, 4]


def test_few_rounds_for_the_momentum_are_told():
    store = "s3://bucket/run"
    assert Diloco(store=store, inner_steps=5, outer_momentum=0.9).warnings(500) == ()
    (said,) = Diloco(store=store, inner_steps=5, outer_momentum=0.9).warnings(495)
    assert "99 outer steps are few for an outer momentum of 0.9" in said and "below 100" in said
    assert Diloco(store=store, inner_steps=20, outer_momentum=0.5).warnings(400) == ()
    assert Diloco(store=store, outer_momentum=0.0).warnings(200) == ()
    assert Diloco(inner_steps=5, outer_momentum=0.9).warnings(20) == ()


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
