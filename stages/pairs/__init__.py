"""Preference pairs from disagreement.

stage.py - plan, run and work of `extract-pairs`
config.py - its settings
actions.py - canonical forms of actions, their outcomes, and the vote in one state
blocks.py - thousands of states at a time as arrays
states.py - the distinct states of a run with the teachers' actions, and the vote in all of them
evidence.py - agreement of teachers, alignment with failed rollouts, the audit of each teacher
continuation.py - both actions of each pair played from its recorded state, and the verdict by the outcomes
groups.py - pairs from groups of rollouts on one task: shared states, rewards, submissions
report.py - the report of an extraction, and its verdict
words.toml - the sentences of refusals and reports
"""
