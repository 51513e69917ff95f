"""Loss kernels of the training channels: pure functions over tensors, checked against upstream's own numbers.

Each docstring gives the formula, shapes, units, reduction, errors and source. Log-probs and losses are in nats. `./dev
parity` compares the functions that channels call with numbers that upstream's own code produced (tests/parity).

tokens.py - shape names, log-probs of tokens, output heads, sums over tokens in chunks
distillation.py - divergences between distributions; SDPO, OPD, TAID and its schedule, EOPD
preference.py - DPO in ten forms, and SimPO
prime_rl.py - PRIME-RL's default loss on packed sequences
"""
