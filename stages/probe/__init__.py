"""`composer probe`: whether training pushes toward a reward hack, and whether projecting gradients slows it.

svd.py - decompose the adapted weights, once
extract_vhack.py - a hack direction from hack/clean pairs
teacher_pool.py - answers of a hacking teacher, of the same teacher without its hint, and of the base model
replay.py - a student learns from the pool; every row's gradient is measured and kept
score.py - v and its placebos on kept gradients, without a model
uat.py - the checks T1 to T4 and what they decide
start.py - a student between an honest model and a hacking one, to train from
compare.py - LoRA against SVD, one direction against another, projected against vanilla trainings
watch.py - an alarm on a training run: does it turn toward a hack?
plot.py - figures of all of it, as PNG and CSV
settings.py - settings of replays, and those that stages share
rows.py - pool rows of rollouts, of other runs' rollouts and of recorded files
sources.py - the models that fill a pool, and groups of answers with advantages
loras.py - LoRAs of PEFT that are added to a model of a pool
memory.py - how much memory a stage takes, before anything is loaded
direction.py - the direction of pairs, placebo directions, and stored gradients scored with both
metrics.py - metrics of gradients along a direction, the rows of a step, and how far a student has moved
descent.py - an arm: an optimiser step that takes a direction out; and the replay
statistics.py - statistics of labelled rows that are not independent, and effect sizes comparable across adapters
watching.py - a watched training, checkpoint by checkpoint
checks/ - what is tested, and what decides
figures.py - the figures of plot and watch

Bases and row gradients are in stages/gradients. Rules and thresholds stand in docs/probe.md. It builds on: projection
of singular-value gradients, wassname/grpo_proj2 @25ad306 and vGROUT_pub @c067218, whose public teacher pool gave the
statistics behind the thresholds; the environment, ariahw/rl-rewardhacking @bf5cdb8; gradients of LoRAs, GRIFT, arXiv
2604.16242 (songtao-x/reward_hack @67e0589); the loss, Dr.GRPO, arXiv 2503.20783.
"""
