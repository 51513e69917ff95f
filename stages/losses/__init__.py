"""Losses: pure functions over tensors, each checked against numbers that upstream's own code produced (`just parity`).

Each docstring gives the formula, shapes, units, reduction, errors and source. Log-probs and losses are in nats. A
kernel that no training channel, probe or integration uses says so: "Serves the parity check only".

shapes.py - names of the tensor shapes in the signatures
divergence.py - forward KL, reverse KL and generalised JSD between log-probs by entry; tail bucket, renormalisation
chunked.py - sums a per-token loss in one piece or chunk by chunk, by the same formula
reduction.py - batchmean and the like; verl's aggregation modes; TRL's mean of sequence means
log_probs.py - log-probs of given tokens and of sequences
jsd.py - generalised JSD (OPSD with token_clip and top-k; GKD; GOLD), and its sampled-token form
hidden.py - losses from hidden states and output heads, and the same divergence in that form
iw_opd.py - IW-OPD: top-k supports with a tail, sparse top-1, importance-weighted sampled tokens
sdpo.py - self-distillation on all, top-k or sampled entries, with the importance clip
sdpo_hidden.py - the same from hidden states and output heads
teachers.py - moving-average and trust-region teachers
taid.py - TAID's loss and its adaptive schedule
distillation_baselines.py - what TAID is compared with: forward, reverse, JS, skewed, total variation, adaptive
simpo.py - SimPO, and TRL's CPO
dpo.py - the loss of a preference pair: 14 types, 4 f-divergences
dpo_batch.py - stacked batches: sequence sums (LD-DPO), WPO weights, mixtures of types, type sft, metrics
eopd.py - entropy-aware on-policy distillation
eopd_hidden.py - the same from hidden states and output heads
opd.py - KL estimates, dual-clip PPO, distillation through either, reverse KL as an advantage
prime_rl.py - PRIME-RL's default, opd and sft losses of May 2026, over packed sequences
prime_rl_components.py - PRIME-RL's newest: ipo, ref_kl and ce, with component weights
advantages.py - GRPO's advantages, and the correction for the sampling engine
parity/ - how recorded cases map onto the above
"""

from stages.losses.dpo import DpoOptions, PairLosses, Pairs, dpo_losses, simpo_loss
from stages.losses.eopd import EopdOptions, SoftTargets, eopd_loss, soft_targets
from stages.losses.hidden import Head, HiddenDivergence, elementwise_divergence, hidden_divergence
from stages.losses.jsd import divergence_loss, generalized_jsd
from stages.losses.reduction import (
    aggregation_weights,
    label_log_probs,
    mean_of_sequence_means,
    sequence_log_probs,
    token_log_probs,
)
from stages.losses.sdpo import (
    importance_weights,
    sampled_token_loss,
    self_distillation_loss,
    trust_region_logits,
    update_average,
)
from stages.losses.taid import TaidSchedule, TaidState, advance, taid_loss

__all__ = [
    "DpoOptions",
    "EopdOptions",
    "Head",
    "HiddenDivergence",
    "PairLosses",
    "Pairs",
    "SoftTargets",
    "TaidSchedule",
    "TaidState",
    "advance",
    "aggregation_weights",
    "divergence_loss",
    "dpo_losses",
    "elementwise_divergence",
    "eopd_loss",
    "generalized_jsd",
    "hidden_divergence",
    "importance_weights",
    "label_log_probs",
    "mean_of_sequence_means",
    "sampled_token_loss",
    "self_distillation_loss",
    "sequence_log_probs",
    "simpo_loss",
    "soft_targets",
    "taid_loss",
    "token_log_probs",
    "trust_region_logits",
    "update_average",
]
