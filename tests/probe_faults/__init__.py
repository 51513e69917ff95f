"""Fault injection for the gradient probe: a small sound world, and every fault that one of its guards must detect.

`./dev probe-selftest` injects them all.

loophole_world.py - tasks, an environment, two policies and pairs over a vocabulary of 24 words, and a tiny Qwen3
world.py - a small sound run of everything that the guards read
guard_checks.py - the guards on such a world, and which of them depend on which
half_precision.py - the same with weights in bfloat16, and whether changes of theta reach the weights
faults.py - the faults, one or more for every guard
test_faults.py - every guard on the sound world, and under every fault
"""
