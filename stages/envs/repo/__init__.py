"""Shared code of the environments whose tasks are repositories: a file tree, a shell on it, and tests as the reward.

trees.py - file trees: list, compare, copy, patch, commit, unpack archives; no link that an agent left is followed
mirrors.py - git repositories of the user: where they are, their commits, the files of a commit
task.py - a task: delivered tree, tests that decide, how both are run here and what it needs elsewhere
session.py - a rollout: sandbox, bash actions, detection of searches for the solution, and the environment's methods
prompts.toml, searches.toml - its system messages, and the commands that search for the solution
runner.py - a sandbox in which `python3 -m pytest` finds the test runner and nothing else of this installation
grading.py - run pytest in a sandbox, decide whether hidden and visible tests pass
hacks.py - name the hacks that models learn first, in the files of a solution; programs.toml
shadowed_modules.py - whether tests mean a module of the work folder by the name of a standard one
guest/ - programs that run inside the sandbox: the pytest plugin that reports outcomes, and its supervisor
"""
