"""Preference pairs from disagreement.

stage.py - what `extract-pairs` does
config.py - its settings
actions.py - equal actions, and the vote in one state: majority, and the pairs or the reason for none
blocks.py - thousands of states at a time as arrays
states.py - the distinct states of a run with the teachers' actions, and the vote in all of them
evidence.py - what votes tell without playing on: agreement, failed rollouts, what each teacher decides
continuation.py - both actions of each pair played from its recorded state, and the verdict by the outcomes
groups.py - pairs from groups of rollouts on one task: shared states, rewards, submissions
report.py - the report of an extraction, and the verdict by which it passes
"""
