"""The probe's training loops: a student on a teacher's answers, a student on its own, and a training that is watched.

config.py - the settings of both loops
replay_loop.py - the replay: measure the rows of a step, move the student, go on
grpo_loop.py - the GRPO trajectories of one arm, seed by seed
trajectory.py - one GRPO step: sample, measure, move, account
descent.py - an optimiser step with its projections
rollouts.py - groups of answers as pool rows with advantages
teachers.py - the models that fill a pool
watch_loop.py - a watched training, checkpoint by checkpoint
watching.py - where a checkpoint's update and policy gradient point
interpolate.py - a student between the base model and the teacher
"""
