"""From disagreement to preference pairs.

canonical.py - the canonical form of an action: what two spellings of one command or tool call share
outcomes.py - what an action led to, by running it from a copy of the recorded state
voting.py - classes of equal actions, majority, and the pairs or the reason for none
groups.py - rollouts of several models on one task: the states they share, their votes and their rewards
submissions.py - what they submitted, by the verdict on it
rows.py - pairs as rows, also all pairs of a group of rollouts
report.py - what came of it
signal.py - do the pairs point anywhere, against the same pairs with their sides shuffled
"""
