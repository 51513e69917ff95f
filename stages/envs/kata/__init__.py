"""Small code-repair tasks with hidden tests, and small models that can solve some of them.

tasks.py - operations and modifiers, their split into train and eval, tasks from a seed
env.py - the environment: the agent's folder, grading, rollouts
recipes.py - the models: which operations each knows, how long each is trained
transcripts.py - written rollouts that the models are trained on, and hack/clean pairs for the gradient probe
checkpoints.py - the models as folders, built on first use, and their tokenizer
"""
