"""The PRIME-RL recipe through a stand-in for prime-rl's loader, and through the real one where it is installed.

The stand-in is built from the documented contract.
"""

import importlib
import importlib.util
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages import integrations
from stages.errors import UsageError
from stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
from stages.losses.prime_rl_components import ref_kl_loss

TOML = Path(integrations.__file__).with_name("rl.toml")


@dataclass
class LossInputs:
    """As prime-rl 559b447 declares it."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossInputsOfMay:
    """As prime-rl 618de8a declares it."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor


def load(config: dict[str, Any]) -> Callable[[Any], Any]:
    """The function a [trainer.loss] table names: split at the last dot, import, bind kwargs."""
    module, _, name = config["import_path"].rpartition(".")
    fn = getattr(importlib.import_module(module), name)
    return lambda inputs: fn(inputs, **config.get("kwargs", {}))


def step_loss(loss_fn: Callable[[Any], Any], sequences: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the sequences over the number of trainable tokens, metrics stacked: prime-rl's compute_loss."""
    outputs = [loss_fn(sequence) for sequence in sequences]
    scale = max(int(sum(s.loss_mask.sum() for s in sequences)), 1)
    return sum(o.loss for o in outputs) / scale, {
        k: torch.stack([o.metrics[k] for o in outputs]) for k in outputs[0].metrics
    }


def random_inputs(seed: int, reference: bool = True) -> LossInputs:
    stream = torch.Generator().manual_seed(seed)

    def logps() -> Tensor:
        return -torch.rand(12, dtype=torch.float64, generator=stream) * 3

    trainer = logps().requires_grad_()
    return LossInputs(
        trainer,
        logps(),
        logps() if reference else None,
        torch.randn(12, dtype=torch.float64, generator=stream),
        torch.arange(12) > 3,
    )


def as_tokens(inputs: LossInputs) -> PackedTokens:
    return PackedTokens(
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        inputs.loss_mask,
        inputs.ref_logprobs,
        inputs.loss_weights,
    )


def config(**kwargs: float) -> dict[str, Any]:
    table = tomllib.loads(TOML.read_text())["trainer"]["loss"]
    return {**table, "kwargs": {**table["kwargs"], **kwargs}}


def test_the_shipped_toml_is_the_default_loss_exactly() -> None:
    sequences = [random_inputs(seed) for seed in range(3)]
    loss, metrics = step_loss(load(config()), sequences)
    expected = sum(default_loss(as_tokens(s), DefaultOptions()).loss for s in sequences) / 24
    assert torch.equal(loss, expected)
    assert all(values.shape == (3,) for values in metrics.values())


def test_the_hint_channel_adds_the_reference_term() -> None:
    inputs = random_inputs(0)
    found = load(config(hint_weight=0.5))(inputs)
    expected = default_loss(as_tokens(inputs), DefaultOptions()).loss + 0.5 * ref_kl_loss(as_tokens(inputs)).loss
    torch.testing.assert_close(found.loss, expected)
    assert "ref_kl" in found.metrics
    (gradient,) = torch.autograd.grad(found.loss, inputs.trainer_logprobs)
    assert bool((gradient[~inputs.loss_mask] == 0).all()) and gradient.abs().sum() > 0


def test_weights_scale_the_tokens() -> None:
    inputs = random_inputs(0)
    inputs.loss_weights = torch.full((12,), 2.0, dtype=torch.float64)
    plain = random_inputs(0)
    torch.testing.assert_close(load(config())(inputs).loss, 2 * load(config())(plain).loss)


def test_inputs_of_may_are_understood() -> None:
    new = random_inputs(0)
    old = LossInputsOfMay(new.trainer_logprobs, new.inference_logprobs, new.ref_logprobs, new.advantages, new.loss_mask)
    assert torch.equal(load(config(hint_weight=1.0))(old).loss, load(config(hint_weight=1.0))(new).loss)


def test_no_reference_no_hint() -> None:
    with pytest.raises(UsageError, match="no reference log-probs"):
        load(config(hint_weight=0.1))(random_inputs(0, reference=False))
    load(config())(random_inputs(0, reference=False))


@pytest.mark.skipif(importlib.util.find_spec("prime_rl") is None, reason="prime-rl is not installed: it needs CUDA")
def test_through_prime_rl_itself() -> None:
    from prime_rl.trainer.rl import loss as theirs

    assert {f.name for f in fields(theirs.LossInputs)} >= {
        "trainer_logprobs",
        "inference_logprobs",
        "advantages",
        "loss_mask",
    }
    assert isinstance(load(config())(random_inputs(0)), theirs.LossOutputs)
