"""Preference pairs from disagreement.

voting.py - the vote in a state: equal actions, majority, and the pairs or the reason for none
blocks.py - thousands of states at a time as arrays, and the tables of runs in DuckDB
states.py - the distinct states of a run with the teachers' actions, and the vote in each
agreement.py - whether teachers agree beyond chance, and oppose the student more than each other
audit.py - the worth of each teacher, and whether disagreement tracks failed rollouts
continuation.py - both actions of each pair played from its recorded state, and the verdict by the outcomes
extraction.py - pairs from the votes of all states, with what is known about them
groups.py - pairs from groups of rollouts on one task: shared states, rewards, submissions
report.py - the report of an extraction, its exit code, and the project's original criterion
"""
