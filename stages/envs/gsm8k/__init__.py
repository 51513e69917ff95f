"""Grade-school maths: one question, one answer, and a reward for the right number.

env.py - numbers in texts, questions from files of the user or from the hub, the environment
"""
