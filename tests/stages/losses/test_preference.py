"""DPO's forms and PRIME-RL's default loss: what is refused, and what upstream's recorded numbers do not show."""

import pytest
import torch

from stages.errors import UsageError
from stages.losses.preference import PairLogProbs, dpo_losses
from stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
from tests.stages.losses.samples import log_probs


def test_a_form_that_is_unknown_or_lacks_token_counts_is_refused() -> None:
    four = log_probs(0, 4)
    for form, shown in (("kto", "'kto'"), ("ipo", "chosen_tokens"), ("sigmoid_norm", "chosen_tokens")):
        with pytest.raises(UsageError, match=shown):
            dpo_losses(PairLogProbs(four, four, four, four), form)


def test_an_infinite_log_prob_at_a_masked_token_spreads_in_prime_rl_as_upstream() -> None:
    inference = torch.tensor([-0.5, -torch.inf])
    tokens = PackedTokens(torch.tensor([-0.4, -0.3]), inference, torch.ones(2), torch.tensor([True, False]))
    assert default_loss(tokens, DefaultOptions()).loss.isnan()


def test_the_reference_gets_no_gradient() -> None:
    own, reference = (torch.zeros(2, requires_grad=True) for _ in range(2))
    dpo_losses(PairLogProbs(own, own, reference, reference)).sum().backward()
    assert own.grad is not None and reference.grad is None
