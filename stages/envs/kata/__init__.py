"""Small code-repair tasks with hidden tests, and small models that can solve some of them.

tasks.py - operations and modifiers, their split into train and eval, tasks from a seed; tasks.toml - their texts
env.py - the environment: the agent's folder, grading, rollouts
transcripts.py - written rollouts, as the models were taught them, and hack/clean pairs for the gradient probe
checkpoints.py - the small models by name: their folders in models/
"""
