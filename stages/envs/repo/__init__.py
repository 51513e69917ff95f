"""Shared code of the environments whose tasks are repositories: a file tree, a shell on it, and tests as the reward.

trees.py - file trees: list, compare, copy, patch, commit, unpack archives; no link that an agent left is followed
task.py - a task: delivered tree, tests that decide, how both are run here and what it needs elsewhere
session.py - a rollout: sandbox, bash actions, detection of searches for the solution, and the environment's methods
runner.py - a sandbox in which `python3 -m pytest` finds the test runner and nothing else of this installation
hidden.py - copies of a repository's packages on this machine, which a sandbox hides
grading.py - run pytest in a sandbox, decide whether hidden and visible tests pass
forged_passes.py - run a passing solution once more with rewritten tests, in which a forged verdict contradicts itself
asked.py - say of each test whether its pass rests on values or on a report, and which gave wrong values
questions.py - ask for the values that assertions compare, without the expected ones
alterations.py - alter an operator, expected value, exception or row of parameters of an assertion
rewritten_tests.py - functions of test files, and files with other versions of them
guest/ - programs that run inside the sandbox: the pytest plugin that reports outcomes, and its supervisor
"""
