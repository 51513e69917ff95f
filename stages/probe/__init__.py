"""`composer probe`: whether training pushes toward a reward hack, and whether projecting gradients slows it.

svd.py - decompose the adapted weights, once
extract_vhack.py - a hack direction from hack/clean pairs
teacher_pool.py - answers of a hacking teacher, of the same teacher without its hint, and of the base model
replay.py - a student trained on the pool; every row's gradient is measured and stored
score.py - v and its placebos on stored gradients, without a model
uat.py - the checks T1 to T4 and their verdict
start.py - a student between an honest model and a hacking one, to train from
compare.py - LoRA against SVD, one direction against another, projected against vanilla trainings
watch.py - an alarm on a training run that turns toward a hack
plot.py - the figures, as PNG and CSV
settings.py - settings of replays, and shared settings
rows.py - pool rows of rollouts, of other runs' rollouts and of recorded files, and advantages within their groups
sources.py - the models that fill a pool, and their answers
loras.py - LoRAs of PEFT added to a model of a pool
memory.py - the memory of a stage, estimated before loading
direction.py - the direction of pairs, and placebo directions
metrics.py - metrics of gradients along a direction, the rows of a step, and the drift of a student
descent.py - an optimiser step that removes a direction; and the replay
statistics.py - statistics of dependent labelled rows, and effect sizes comparable across adapters
watching.py - a watched training, checkpoint by checkpoint
checks/ - the checks, and their questions and thresholds in checks.toml
figures.py - the figures of plot and watch
words.toml - the sentences of refusals and reports

Bases and row gradients are in stages/gradients. Rules and thresholds: docs/probe.md. It builds on: projection
of singular-value gradients, wassname/grpo_proj2 @25ad306 and vGROUT_pub @c067218, whose public teacher pool gave the
statistics behind the thresholds; the environment, ariahw/rl-rewardhacking @bf5cdb8; gradients of LoRAs, GRIFT, arXiv
2604.16242 (songtao-x/reward_hack @67e0589); the loss, Dr.GRPO, arXiv 2503.20783.
"""
