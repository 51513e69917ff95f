"""Grade-school maths: one question, one answer, and a reward for the right number.

numbers.py - the number that a text answers with
rows.py - questions from files of the user or from the hub
env.py - the environment
lessons.py - what a tiny model is taught
checkpoints.py - the tiny model, built from a file of rows
"""
