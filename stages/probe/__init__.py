"""`composer probe`: whether training pushes toward a reward hack, and whether projecting gradients slows it.

svd.py - decompose the adapted weights, once
extract_vhack.py - a hack direction from hack/clean pairs
teacher_pool.py - answers of a hacking teacher, of the same teacher without its hint, and of the base model
replay.py - a student learns from the pool; every row's gradient is measured and kept
score.py - v and its placebos on kept gradients, without a model
uat.py - the checks T1 to T4 and what they decide
grpo.py - a GRPO trajectory and whether its own gradient leads to hacking
compare.py - LoRA against SVD, one direction against another, projected against vanilla trajectories
watch.py - an alarm on a training run: does it turn toward a hack?
plot.py - figures of all of it, each with a CSV twin
selftest.py - every guard, and for every guard a fault that it must notice
adapters/ - where the trained numbers sit in a model
pool/ - rows of answers, as tokens and on disk
gradients/ - every row's own gradient from one backward pass
directions/ - hack directions, placebos, projections and scores
checks/ - what is tested, and what decides
loops/ - the training loops of replay and grpo
figures.py - the figures of plot and watch

Rules and thresholds stand in docs/probe.md. It builds on: projection of singular-value gradients, wassname/grpo_proj2
@25ad306 and vGROUT_pub @c067218, whose public teacher pool gave the statistics behind the thresholds; the environment,
ariahw/rl-rewardhacking @bf5cdb8; gradients of LoRAs, GRIFT, arXiv 2604.16242 (songtao-x/reward_hack @67e0589); the
loss, Dr.GRPO, arXiv 2503.20783.
"""
