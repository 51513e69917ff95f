"""Grade-school maths: one question, one answer, and a reward for the right number.

env.py - questions from files of the user or from the hub, the environment
answers.py - what counts as the final answer of a text, and whether it is right; writings.toml - writings of numbers
worker.py - the process that asks math-verify
"""
