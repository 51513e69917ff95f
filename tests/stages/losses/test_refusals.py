"""Bad options are refused in a sentence that shows the value."""

from collections.abc import Callable

import pytest
import torch
from parity.kernels.advantages import group_advantages, sampling_correction
from parity.kernels.iw_opd import iw_opd
from parity.kernels.jsd import generalized_jsd
from parity.kernels.opd import PpoOptions, distillation_loss, kl_estimate, ppo_loss, reverse_kl_advantages
from parity.kernels.preference import BatchOptions, DpoBatch, DpoOptions, cpo_loss, dpo_batch_loss, dpo_losses
from parity.kernels.prime_rl import opd_loss, ref_kl_loss
from parity.sdpo import sampled_token_loss

from stages.errors import UsageError
from stages.losses import TaidSchedule, simpo_loss
from stages.losses.dpo import PairLogProbs
from stages.losses.prime_rl import PackedTokens
from stages.losses.reduction import aggregation_weights
from tests.stages.losses.samples import log_probs, logits

TOKENS, ONES = log_probs(0, 2, 3), torch.ones(2, 3)
FOUR = log_probs(0, 4)
PAIRS = PairLogProbs(FOUR, FOUR, FOUR, FOUR)
PACKED = PackedTokens(FOUR, FOUR, FOUR, torch.ones(4, dtype=torch.bool))
IDS = torch.zeros(2, 3, dtype=torch.long)

REFUSED: dict[str, Callable[[], object]] = {
    "median": lambda: generalized_jsd(logits(0, 2, 3, 4), logits(1, 2, 3, 4), reduction="median"),
    "token-median": lambda: aggregation_weights(ONES, "token-median"),
    "alpha is 0.5": lambda: sampled_token_loss(TOKENS, TOKENS, alpha=0.5),
    "t_start=1.5": lambda: TaidSchedule(t_start=1.5),
    "t_end=0.0": lambda: TaidSchedule(t_end=0.0),
    "alpha=2": lambda: TaidSchedule(alpha=2),
    "ppo": lambda: simpo_loss(FOUR, FOUR, loss_type="ppo"),
    "cpo": lambda: cpo_loss(FOUR, FOUR, loss_type="cpo"),
    "kto": lambda: dpo_losses(PAIRS, "kto"),
    "token counts": lambda: dpo_losses(PAIRS, "ipo"),
    "label_smoothing, which is 0.0": lambda: dpo_losses(PAIRS, "exo_pair"),
    "got 0.5": lambda: dpo_losses(PAIRS, "robust", DpoOptions(label_smoothing=0.5)),
    "hellinger": lambda: dpo_losses(PAIRS, "sigmoid", DpoOptions(f_divergence="hellinger")),
    "log_sum_sq_probs": lambda: dpo_batch_loss(
        DpoBatch(TOKENS, TOKENS, torch.ones(2, 4)), BatchOptions(use_weighting=True)
    ),
    "'k4'": lambda: kl_estimate(TOKENS, TOKENS, "k4"),
    "ratio_cap is 1.0": lambda: ppo_loss(TOKENS, TOKENS, TOKENS, ONES, PpoOptions(ratio_cap=1.0)),
    "old_log_probs": lambda: distillation_loss(TOKENS, TOKENS, ONES),
    "ignores the teacher": lambda: distillation_loss(TOKENS, TOKENS, ONES, estimator="k1", use_policy_gradient=False),
    "no sequences": lambda: reverse_kl_advantages([]),
    "no reference log-probs": lambda: opd_loss(PACKED),
    "no reference": lambda: ref_kl_loss(PACKED),
    "'global'": lambda: group_advantages(FOUR, 2, "global"),
    "'word_mask'": lambda: sampling_correction(TOKENS, TOKENS, ONES, mode="word_mask"),
    "at 6 of 6 tokens": lambda: iw_opd(logits(0, 2, 3, 4), IDS, IDS, torch.full((2, 3), torch.nan)),
}


@pytest.mark.parametrize("shown", REFUSED)
def test_refused(shown: str) -> None:
    with pytest.raises(UsageError, match=shown.replace("(", r"\(")):
        REFUSED[shown]()
