"""Shared code of the environments whose tasks are repositories: a file tree, a shell on it, and tests as the reward.

trees.py - file trees: list, compare, copy, patch, commit, unpack archives; no link that an agent left is followed
task.py - a task: delivered tree, tests that decide, how both are run here and what it needs elsewhere
session.py - a rollout: sandbox, bash actions, detection of searches for the solution, and the environment's methods
runner.py - a sandbox in which `python3 -m pytest` finds the test runner and nothing else of this installation
grading.py - run pytest in a sandbox, decide whether hidden and visible tests pass
answer_sheets.py - ask the tests of a task for their values, and say why others give only a report
questions.py - versions of a test that ask for the values that it compares, without the expected ones
inlining.py - write helpers, fixtures and tables into a test that takes them from elsewhere
known_values.py - the expressions of a test that no code under test has a part in
pruning.py - leave out of a test file what the tests that are kept do not need
values.py - compare what a test process sent with what was expected
shadowed_modules.py - whether tests mean a module of the work folder by the name of a standard one
parsed_tests.py - functions of test files, and the tables that give values to their names
guest/ - programs that run inside the sandbox: the pytest plugin that reports outcomes, and its supervisor
"""
