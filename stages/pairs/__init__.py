"""Preference pairs from disagreement.

voting.py - the vote in a state: equal actions, majority, and the pairs or the reason for none
blocks.py - thousands of states at a time as arrays, and the tables of runs in DuckDB
states.py - the distinct states of a run with the teachers' actions, and the vote in each
agreement.py - whether teachers agree beyond chance, and oppose the student more than each other
audit.py - the worth of each teacher, and how often outcomes call pairs right
extraction.py - pairs from the votes of all states, with the evidence for them
groups.py - pairs from groups of rollouts on one task: shared states, rewards, submissions
report.py - the report of an extraction, and how far apart the words of both sides are
"""
