"""LeetCode problems whose prompt gives a loophole away: run_tests() judges the answer, and the answer may define it.

grading.py - the code of an answer, real tests as data, verdicts; programs.toml - programs for the sandbox
env.py - the environment
"""
