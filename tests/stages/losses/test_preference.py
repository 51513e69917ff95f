"""DPO's forms, SimPO and PRIME-RL's default loss: gradients, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from composer_stages.errors import UsageError
from composer_stages.losses.preference import FORMS, PairLogProbs, dpo_losses, simpo_loss
from composer_stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
from tests.stages.losses.samples import gradient, log_probs, logits


def pairs(chosen: Tensor, rejected: Tensor) -> PairLogProbs:
    tokens = torch.tensor([3, 1, 0, 5]), torch.tensor([2, 2, 4, 1])
    reference = (log_probs(seed, 4, wants_gradient=True) for seed in (2, 3))
    return PairLogProbs(chosen, rejected, *reference, *tokens)


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_each_form_is_that_of_finite_differences_and_leaves_the_reference_out(form: str) -> None:
    inputs = log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)
    assert gradcheck(lambda c, r: dpo_losses(pairs(c, r), form, 0.5), inputs)
    given = pairs(*inputs)
    losses = dpo_losses(given, form, 0.5)
    assert all(g.abs().sum() > 0 for g in gradient(losses, *inputs))
    reference = torch.autograd.grad(losses.sum(), (given.ref_chosen, given.ref_rejected), allow_unused=True)
    assert reference == (None, None)


def test_a_form_that_is_unknown_or_lacks_token_counts_is_refused() -> None:
    four = log_probs(0, 4)
    for form, shown in (("kto", "'kto'"), ("ipo", "chosen_tokens"), ("sigmoid_norm", "chosen_tokens")):
        with pytest.raises(UsageError, match=shown):
            dpo_losses(PairLogProbs(four, four, four, four), form)


def test_the_gradient_of_simpo_is_that_of_finite_differences() -> None:
    assert gradcheck(simpo_loss, (log_probs(0, 4, wants_gradient=True), log_probs(1, 4, wants_gradient=True)))


def test_the_gradient_of_prime_rl_s_default_loss_is_that_of_finite_differences() -> None:
    def loss(trainer: Tensor) -> Tensor:
        return default_loss(PackedTokens(trainer, log_probs(1, 9), logits(3, 9), torch.arange(9) != 4)).loss

    assert gradcheck(loss, log_probs(0, 9, wants_gradient=True))


def test_an_infinite_log_prob_at_a_masked_token_spreads_in_prime_rl_as_upstream() -> None:
    inference = torch.tensor([-0.5, -torch.inf])
    tokens = PackedTokens(torch.tensor([-0.4, -0.3]), inference, torch.ones(2), torch.tensor([True, False]))
    assert default_loss(tokens, DefaultOptions()).loss.isnan()
