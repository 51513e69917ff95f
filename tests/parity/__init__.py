"""How the cases of golden files, recorded by running upstream's own code, map onto our kernels: one file a family.

A family maps upstream's function name to a runner: Case -> Outcome. Options come from the case's args, never from its
name.

__main__.py - the command `python -m parity [FILES...]`: runs golden files, compares, prints totals
check.py - a recorded case held against a function's numbers
against.py - upstream's own functions, run from a clone on the recorded inputs
source.py - functions taken out of a source file without its other imports
case.py - what a case holds, and the tensors made of it
grpo.py - GRPO: TRL's own trainer methods, on a plain holder of the attributes that they read
jsd.py - the generalised Jensen-Shannon family: OPSD; TRL's GKD, GOLD, IW-OPD and chunked divergence
opd.py - on-policy distillation: verl, tinker-cookbook, EOPD
preference.py - SimPO; TRL's CPO and DPO
prime_rl.py - PRIME-RL, May 2026 and newest snapshot
sdpo.py - lasgroup's SDPO; TRL's SDPO and SDFT
taid.py - TAID, its scheduler and its baselines
"""

from parity import grpo, jsd, opd, preference, prime_rl, sdpo, taid
from parity.case import Runner

__all__ = ["FLOAT32_BY_DESIGN", "RUNNERS"]

RUNNERS: dict[str, Runner] = {
    **prime_rl.RUNNERS,
    **jsd.RUNNERS,
    **sdpo.RUNNERS,
    **taid.RUNNERS,
    **preference.RUNNERS,
    **opd.RUNNERS,
    **grpo.RUNNERS,
}

FLOAT32_BY_DESIGN = taid.RUNNERS.keys() | {"incorporate_kl_penalty", "_chunked_divergence_loss"}
"""Functions whose arithmetic is float32 whatever the dtype of the inputs."""
