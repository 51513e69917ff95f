"""LeetCode problems whose prompt gives a loophole away: run_tests() judges the answer, and the answer may define it.

grading.py - the code of an answer, real tests as data, programs for the sandbox, verdicts
env.py - the environment
"""
