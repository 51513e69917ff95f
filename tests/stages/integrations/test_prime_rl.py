"""The PRIME-RL recipe through a stand-in for prime-rl's loader, and through the real one where it is installed.

The stand-in is built from the documented contract.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from needs import needs
from torch import Tensor

from stages.errors import UsageError
from stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss


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
    return {"type": "custom", "import_path": "stages.integrations.prime_rl.composed_loss", "kwargs": kwargs}


def test_the_custom_loss_is_the_default_loss_exactly() -> None:
    sequences = [random_inputs(seed) for seed in range(3)]
    loss, metrics = step_loss(load(config()), sequences)
    expected = sum(default_loss(as_tokens(s), DefaultOptions()).loss for s in sequences) / 24
    assert torch.equal(loss, expected)
    assert all(values.shape == (3,) for values in metrics.values())


def test_the_hint_channel_is_refused_as_no_token_of_it_comes_here() -> None:
    with pytest.raises(UsageError, match=r"hint_weight is 0\.5, but prime-rl keeps the tokens of its reference KL"):
        load(config(hint_weight=0.5))(random_inputs(0))


def test_reference_log_probs_of_others_in_the_pack_change_nothing() -> None:
    with_them, without = random_inputs(0), random_inputs(0)
    without.ref_logprobs = None
    assert torch.equal(load(config())(with_them).loss, load(config())(without).loss)


def test_weights_scale_the_tokens() -> None:
    inputs = random_inputs(0)
    inputs.loss_weights = torch.full((12,), 2.0, dtype=torch.float64)
    plain = random_inputs(0)
    torch.testing.assert_close(load(config())(inputs).loss, 2 * load(config())(plain).loss)


def test_inputs_of_may_are_understood() -> None:
    new = random_inputs(0)
    old = LossInputsOfMay(new.trainer_logprobs, new.inference_logprobs, new.ref_logprobs, new.advantages, new.loss_mask)
    assert torch.equal(load(config())(old).loss, load(config())(new).loss)


@needs("prime-rl")
def test_through_prime_rl_itself() -> None:
    from prime_rl.trainer.rl import loss as theirs

    assert {f.name for f in fields(theirs.LossInputs)} >= {
        "trainer_logprobs",
        "inference_logprobs",
        "advantages",
        "loss_mask",
    }
    assert isinstance(load(config())(random_inputs(0)), theirs.LossOutputs)
