"""Fault injection for the gradient probe: a small sound world, and every fault that one of its guards must detect.

`composer probe selftest` runs it from a checkout, tests/stages/probe/test_selftest.py fault by fault.

loophole_world.py - tasks, an environment, two policies and pairs over a vocabulary of 24 words, and a tiny Qwen3
world.py - a small sound run of everything that the guards read
guard_checks.py - the guards on such a world, and which of them depend on which
half_precision.py - the same with weights in bfloat16, and whether changes of theta reach the weights
faults.py - the faults, one or more for every guard
"""
