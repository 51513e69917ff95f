"""Loss kernels of the training channels: pure functions over tensors, checked against upstream's own numbers.

Each docstring gives the formula, shapes, units, reduction, errors and source. Log-probs and losses are in nats. `./dev
parity` compares every kernel with numbers that upstream's own code produced (tests/parity, which also holds the
upstream kernels that no channel uses).

reduction.py - shape names, log-probs of tokens, sums over tokens in chunks, verl's averages over tokens and sequences
hidden.py - output heads, divergences between distributions, losses from hidden states without a table of logits
sdpo.py - self-distillation on all, top-k or sampled entries, its importance clip and its teachers
taid.py - TAID's loss and adaptive schedule
eopd.py - entropy-aware on-policy distillation
dpo.py - DPO in ten forms, and SimPO
prime_rl.py - PRIME-RL's default loss on packed sequences
"""

from stages.losses.dpo import PairLogProbs, dpo_losses, simpo_loss
from stages.losses.eopd import EopdOptions, SoftTargets, eopd_loss, soft_targets
from stages.losses.hidden import Head, elementwise_divergence
from stages.losses.reduction import aggregation_weights, token_log_probs
from stages.losses.sdpo import importance_weights, self_distillation_loss, trust_region_logits, update_average
from stages.losses.taid import TaidSchedule, TaidState, advance, taid_loss

__all__ = [
    "EopdOptions",
    "Head",
    "PairLogProbs",
    "SoftTargets",
    "TaidSchedule",
    "TaidState",
    "advance",
    "aggregation_weights",
    "dpo_losses",
    "elementwise_divergence",
    "eopd_loss",
    "importance_weights",
    "self_distillation_loss",
    "simpo_loss",
    "soft_targets",
    "taid_loss",
    "token_log_probs",
    "trust_region_logits",
    "update_average",
]
