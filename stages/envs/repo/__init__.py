"""What environments share whose tasks are repositories: a tree of files, a shell on it, and tests that decide.

trees.py - folders of files: copies, what changed between two, patches; never trusts what an agent left
archives.py - archives of source code, unpacked below a folder
protected_files.py - which files no solution may bring: tests, test configuration, what Python loads by itself
session.py - an episode's folder, a sandbox on it, bash actions, and the environment's methods on them
canary.py - notices an agent that searches for the solution instead of writing it
outcomes.py - one run of pytest in a sandbox and the outcome of every test
grading.py - what counts as resolved; strict and loose verdicts, and whether a pass was made rather than earned
crosscheck.py - a second run of what passes, in which a forged verdict contradicts itself
altered_tests.py - test files with some tests silently broken
guest/ - the pytest plugin that reports from inside the sandbox, and the supervisor that it reports to
"""
