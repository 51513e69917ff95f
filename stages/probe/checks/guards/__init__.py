"""Guards: one check for every known way in which such a probe misleads; `selftest` makes each fail on purpose.

claims.py - the claim rests on v, not on any direction
lora.py - where a LoRA's gradient is, and whether its basis stays
measurement.py - gradients are those of the right tokens, of every row
prompts.py - the pool was asked what it should have been asked
removal.py - a direction was really taken out, the right one, everywhere
teacher.py - the teacher is not the base model
trajectory.py - a GRPO step still learns, and from what it should

For every failure that the plan of the probe names, and those that its authors met, there is a guard, and in
`synthetic.faults` the fault that must turn it red.
"""
