"""The probe's training loops: a student on a teacher's recorded answers, and a student on its own.

config.py - the settings of both loops
replay_loop.py - the replay: measure the rows of a step, move the student, go on
grpo_loop.py - the GRPO trajectories of one arm, seed by seed
trajectory.py - one GRPO step: sample, measure, move, account
descent.py - an optimiser step with its projections
rollouts.py - groups of answers as pool rows with advantages
teachers.py - the models that fill a pool
interpolate.py - a student between the base model and the teacher
"""
