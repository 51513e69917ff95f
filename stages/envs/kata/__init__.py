"""Small code-repair tasks with hidden tests, and small models that know how to work on some of them.

language.py - the operations and modifiers that tasks are made of, their words, the split into train and eval
tasks.py - tasks from a seed
workspace.py - the agent's folder: set up, read back safely, removed
env.py - the environment
grading.py - verdicts on many episodes at once
recipes.py - the models: which operations each knows, how long each is trained
transcripts.py - written episodes of an author with a given knowledge
loophole.py - written episodes of an author who overwrites the visible tests, or does not
hack_pairs.py - hack/clean pairs: two episodes on one task that differ in that alone
tokenizer.py - the tokenizer that the models share
training.py - how a model learns from transcripts
checkpoints.py - the models as folders, built on first use
"""
