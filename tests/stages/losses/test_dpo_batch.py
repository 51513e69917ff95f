"""Stacked preference batches: sums, weights and mixtures, against the same worked out pair by pair."""

import torch
from parity.kernels.preference import (
    BatchOptions,
    DpoBatch,
    DpoOptions,
    batch_pairs,
    dpo_batch_loss,
    dpo_losses,
    pair_weights,
)

from tests.stages.losses.samples import log_probs

# Rows: two chosen, two rejected. Completions of 3 and 1 scored tokens against 2 and 4; the last starts at position 0.
MASK = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def batch() -> DpoBatch:
    own, reference = (log_probs(seed, 4, 4) * MASK[:, 1:] for seed in (0, 1))
    return DpoBatch(own, reference, MASK, log_probs(2, 4, 4))


def test_plain_sums_and_unshifted_counts() -> None:
    pairs = batch_pairs(batch())
    assert torch.equal(torch.cat([pairs.chosen, pairs.rejected]), batch().log_probs.sum(1))
    assert pairs.chosen_tokens.tolist() == [3, 1] and pairs.rejected_tokens.tolist() == [2, 5]


def test_ld_alpha_scales_what_exceeds_the_shorter_completion_in_full_precision() -> None:
    own = batch().log_probs
    pairs = batch_pairs(batch(), ld_alpha=0.3)
    expected = torch.stack([own[0, 1] + own[0, 2] + 0.3 * own[0, 3], own[1, 0]])
    torch.testing.assert_close(pairs.chosen, expected, rtol=1e-15, atol=0)
    expected = torch.stack([own[2, 0] + own[2, 1], own[3, 0] + 0.3 * own[3, 1:].sum()])
    torch.testing.assert_close(pairs.rejected, expected, rtol=1e-15, atol=0)


def test_ld_alpha_of_one_is_the_plain_sum() -> None:
    torch.testing.assert_close(
        batch_pairs(batch(), ld_alpha=1.0).chosen, batch_pairs(batch()).chosen, rtol=1e-15, atol=0
    )


def test_a_mixture_is_the_weighted_sum_of_its_types_and_defaults_to_one_each() -> None:
    options = DpoOptions(beta=0.5, label_smoothing=0.1)
    types = ("sigmoid", "aot", "ipo")
    means = [dpo_losses(batch_pairs(batch()), loss_type, options).mean() for loss_type in types]
    for weights, factors in ((None, (1, 1, 1)), ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5))):
        loss, _ = dpo_batch_loss(batch(), BatchOptions(types, weights, pair=options))
        expected = sum(factor * mean for factor, mean in zip(factors, means, strict=True))
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)


def test_sft_is_the_chosen_tokens_mean_and_ignores_the_reference() -> None:
    loss, _ = dpo_batch_loss(batch(), BatchOptions(("sft",)))
    chosen = batch().log_probs[:2][MASK[:2, 1:].bool()]
    torch.testing.assert_close(loss, -chosen.mean(), rtol=1e-15, atol=0)


def test_weights_carry_no_gradient_and_scale_each_pair() -> None:
    own = batch()
    own.log_probs.requires_grad_()
    weights = pair_weights(own)
    assert not weights.requires_grad
    loss, _ = dpo_batch_loss(own, BatchOptions(("sigmoid",), use_weighting=True))
    expected = (dpo_losses(batch_pairs(own), "sigmoid", DpoOptions()) * weights).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-15, atol=0)


def test_rewards_are_the_log_ratios_whatever_the_divergence() -> None:
    metrics = [
        dpo_batch_loss(batch(), BatchOptions(pair=DpoOptions(f_divergence=name)))[1]
        for name in ("reverse_kl", "forward_kl")
    ]
    assert all(torch.equal(metrics[0][key], metrics[1][key]) for key in metrics[0])
