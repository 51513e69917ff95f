"""GRPO's advantages from rewards, and the correction for an engine whose log-probs are not the trainer's.

Serves the parity check only: training leaves both to TRL.
"""

import torch

from stages.errors import UsageError
from stages.losses.reduction import (
    Groups,
    PerGroup,
    PerSequence,
    Ratios,
    Rewards,
    RewardWeights,
    TokenMask,
    TokenValues,
)

EPSILON = 1e-4

SCALINGS = ("group", "batch", "none")
CORRECTIONS = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def group_advantages(rewards: PerSequence, group_size: int, scaling: str = "group") -> tuple[PerSequence, PerSequence]:
    """(reward - group mean) / (std + 1e-4), and the std of each row.

    scaling: std of the "group" or of the whole "batch"; "none" leaves the division out. Groups are consecutive rows.
    NaN rewards (nothing could score them) leave mean and std and get advantage 0, as does a row whose std is NaN (one
    scored row in its group). The std has Bessel's correction; 0 for a single row. Raises UsageError for an unknown
    scaling. Serves the parity check only.
    Source: TRL 1.16 trainer/grpo_trainer.py:2759-2810, sum_then_normalize.
    """
    groups = rewards.view(-1, group_size)
    if scaling not in SCALINGS:
        raise UsageError(f"scale_rewards is {scaling!r}; choose group, batch or none")
    spread = _nan_std(rewards.view(1, -1)) if scaling == "batch" else _nan_std(groups)
    spread = spread.repeat_interleave(len(rewards) if scaling == "batch" else group_size, dim=0)
    advantages = rewards - groups.nanmean(1).repeat_interleave(group_size, dim=0)
    return (advantages if scaling == "none" else advantages / (spread + EPSILON)).nan_to_num(nan=0.0), spread


def weighted_rewards(rewards: Rewards, weights: RewardWeights) -> PerSequence:
    """Sum over reward functions of weight * reward, NaN where none scored the row; a NaN among others is 0.

    Serves the parity check only.
    """
    return (rewards * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def normalized_then_summed(
    rewards: Rewards, weights: RewardWeights, group_size: int
) -> tuple[PerSequence, PerSequence]:
    """Rewards standardised in their group, summed with weights, standardised over the batch (GDPO); and that std.

    Serves the parity check only. Source: TRL 1.16 trainer/grpo_trainer.py:2791-2803, normalize_then_sum.
    """
    columns = torch.stack([_standardised(column, group_size) for column in rewards.unbind(1)], dim=1)
    total = (columns * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    spread = _nan_std(total.view(1, -1)).expand_as(total)
    return ((total - total.nanmean()) / (spread + EPSILON)).nan_to_num(nan=0.0), spread


def _standardised(rewards: PerSequence, group_size: int) -> PerSequence:
    groups = rewards.view(-1, group_size)
    return ((groups - groups.nanmean(1, keepdim=True)) / (_nan_std(groups).unsqueeze(1) + EPSILON)).flatten()


def _nan_std(groups: Groups) -> PerGroup:
    """Std over each group's scored values, Bessel-corrected: 0 for groups of one, NaN where one value is scored."""
    from trl.trainer.utils import nanstd

    return nanstd(groups, dim=1) if groups.shape[1] > 1 else groups.new_zeros(len(groups))


def sampling_correction(
    old_log_probs: TokenValues,
    sampling_log_probs: TokenValues,
    mask: TokenMask,
    *,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Ratios:
    """Importance ratio trainer / engine: [b, t] in the token modes, [b, 1] in the sequence modes.

    A sequence's log-ratio is the SUM over its tokens. truncate clamps to [clip_min, clip_max]; mask sets ratios outside
    to 0 (strict). A NaN log-prob counts as ratio 1.
    Raises UsageError for an unknown mode. Serves the parity check only.
    Source: TRL 1.16 trainer/grpo_trainer.py:2660-2707.
    """
    if mode not in CORRECTIONS:
        raise UsageError(f"sampling correction {mode!r} is unknown; choose one of {', '.join(CORRECTIONS)}")
    log_ratio = ((old_log_probs - sampling_log_probs) * mask).nan_to_num(nan=0.0)
    ratio = (log_ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    low = -torch.inf if clip_min is None else clip_min
    high = torch.inf if clip_max is None else clip_max
    return (
        ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    )
