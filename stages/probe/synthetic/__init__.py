"""A small synthetic world with a loophole, a sound run of the probe in it, and every fault that guards must notice.

loophole_world.py - tasks, an environment, two policies and pairs, of forty words
world.py - a small sound run of everything that the guards look at
guard_checks.py - the guards on such a world, and which of them presuppose which
half_precision.py - the same with weights in bfloat16, and whether changes of theta arrive in them
faults.py - the faults, one or more for every guard
pool_faults.py - those of a pool: its prompts, its teacher, its labels, its size
"""
