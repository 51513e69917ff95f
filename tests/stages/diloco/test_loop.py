"""Rounds in memory, and every case in which torchft 0.2.0's DiLoCo goes wrong (its letters, a to g)."""

import numpy as np
import pytest
import torch
from support.replicas import Replica, together

from composer_stages.diloco import arrays
from composer_stages.diloco.arrays import norm
from composer_stages.diloco.settings import Codec, Diloco

PLAIN = {"codec": "float32", "outer_learning_rate": 1.0, "outer_momentum": 0.0}


def settings(replicas: int = 3, **more: object) -> Diloco:
    return Diloco.model_validate({"replicas": replicas, "inner_steps": 4, **more})


@pytest.mark.parametrize(
    ("codec", "fragments"), [("float32", 1), ("bf16", 1), ("int8", 1), ("int4", 1), ("float32", 2), ("int4", 4)]
)
def test_all_replicas_hold_the_same_bytes(codec: Codec, fragments: int):
    replicas = [Replica(number) for number in range(3)]
    start = replicas[0].bytes()
    loops = together(settings(codec=codec, fragments=fragments), 8, replicas)
    assert len({replica.bytes() for replica in replicas}) == 1 != start
    assert len({loop.state.digest for loop in loops}) == 1
    assert replicas[0].bytes() != start


def test_a_round_changes_its_own_fragment_only():
    """torchft, one outer optimiser: inner gradients of the other fragments became outer steps."""
    replicas = [Replica(number) for number in range(2)]
    chosen = settings(2, fragments=2, **PLAIN)
    parts = replicas[0].fragments(chosen)
    loops = together(chosen, 1, replicas, of=2)
    start = arrays.copied(Replica(0).parameters)
    for name in parts.round_shapes(1):
        assert np.array_equal(loops[0].state.weights[name], start[name])
        assert not np.array_equal(replicas[0].parameters[name].detach(), replicas[1].parameters[name].detach())
    for name in parts.round_shapes(0):
        assert not np.array_equal(loops[0].state.weights[name], start[name])


def test_tensors_of_all_sizes_are_reduced():
    """torchft, several buckets: replicas diverged unseen, and a tensor larger than a bucket was never reduced."""
    replicas = [Replica(number, width=60) for number in range(3)]  # 3600, 60, 180 and 3 numbers
    start = arrays.copied(replicas[0].parameters)
    loops = together(settings(codec="int4"), 6, replicas)
    assert len({replica.bytes() for replica in replicas}) == 1
    assert all(not np.array_equal(array, start[name]) for name, array in loops[0].state.weights.items())


def test_frozen_parameters_are_not_sent():
    """torchft reduced a frozen base with its adapters: 1,001,020 numbers for 20."""
    replicas = [Replica(number, width=60) for number in range(2)]
    for replica in replicas:
        replica.model[0].requires_grad_(False)
    frozen = replicas[0].model[0].weight.detach().clone()
    (_, loop) = together(settings(2, codec="float32"), 1, replicas)
    assert set(loop.state.weights) == {"2.weight", "2.bias"}
    assert loop._store.bucket.sent < 4 * 183 + 500, "one offer: 183 of 3,843 numbers, and a header"
    assert torch.equal(replicas[0].model[0].weight, frozen)


def test_integer_codecs_save_bytes_without_a_gpu():
    """torchft's should_quantize fell through to full precision on a CPU."""
    sent = {
        codec: together(settings(codec=codec), 4, [Replica(n, 200) for n in range(3)])
        for codec in ("float32", "int8", "int4")
    }
    bytes_ = {codec: loops[1]._store.bucket.sent for codec, loops in sent.items()}
    assert bytes_["float32"] / bytes_["int8"] > 3.9
    assert bytes_["float32"] / bytes_["int4"] > 7.7


def test_the_first_round_averages_the_steps_of_all_replicas():
    """torchft healed all replicas to the first one's stepped weights, and averaged it with copies of itself."""
    both = together(settings(2, **PLAIN), 1)
    alone = together(settings(1, quorum=1, **PLAIN), 1)
    assert both[0].state.digest != alone[0].state.digest
    assert both[0].history[0].replicas == (0, 1)


def test_inner_optimisers_keep_their_state_over_rounds():
    replicas = [Replica(number) for number in range(2)]
    together(settings(2), 3, replicas)
    steps = {int(state["step"]) for r in replicas for state in r.optimizer.state.values()}
    assert steps == {12}


def test_tied_weights_are_sent_once():
    replicas = [Replica(number) for number in range(2)]
    for replica in replicas:
        replica.model.append(torch.nn.Linear(8, 3))
        replica.model[3].weight = replica.model[2].weight
        replica.model[3].bias = replica.model[2].bias
        replica.model.forward = torch.nn.Sequential(*list(replica.model)[:3]).forward
    (loop, _) = together(settings(2, fragments=2), 2, replicas)
    assert set(loop.state.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_outer_step_of_a_round_is_pytorchs():
    """Three rounds of two replicas, done by hand with torch.optim.SGD."""
    chosen = settings(2, codec="float32", outer_learning_rate=0.7, outer_momentum=0.9)
    hand = [Replica(number) for number in range(2)]
    shared = {name: torch.nn.Parameter(p.detach().clone()) for name, p in hand[0].parameters.items()}
    upstream = torch.optim.SGD(shared.values(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        for replica in hand:
            for _ in range(4):
                replica.step()
        for name, parameter in shared.items():
            slopes = [parameter.detach() - r.parameters[name].detach() for r in hand]
            parameter.grad = torch.stack(slopes).double().mean(0).float()
        upstream.step()
        for replica in hand:
            arrays.put(arrays.copied(shared), replica.parameters)
    loops = together(chosen, 3)
    for name, parameter in shared.items():  # whose steps other processors may round otherwise
        np.testing.assert_allclose(loops[0].state.weights[name], parameter.detach(), rtol=0, atol=1e-5)


def test_momentum_is_kept_by_fragment():
    (loop, *_) = together(settings(fragments=2, outer_momentum=0.5), 1)
    about = Replica(0).fragments(settings(fragments=2)).round_shapes(0)
    zero = {name for name, array in loop.state.momentum.items() if not array.any()}
    assert zero == set(loop.state.weights) - set(about)
    assert norm({name: loop.state.momentum[name] for name in about}) == pytest.approx(loop.history[0].norm)
