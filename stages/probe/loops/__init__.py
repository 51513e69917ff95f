"""The probe's training loops: a student on a teacher's answers, a student on its own, and a training that is watched.

config.py - the settings of pool, replay and GRPO trajectories
replay_loop.py - the replay: measure the rows of a step, move the student, repeat
grpo_loop.py - the GRPO trajectories of one arm, seed by seed
watch_loop.py - a watched training, checkpoint by checkpoint
rollouts.py - answers as pool rows with advantages, and the models that fill a pool
"""
