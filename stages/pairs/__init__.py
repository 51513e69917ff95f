"""From disagreement to preference pairs.

blocks.py - some thousand states at a time as arrays, and whose actions were equal
ballots.py - the vote in a state
canonical.py - the canonical form of an action: what two spellings of one command or tool call share
outcomes.py - what an action led to, by running it from a copy of the recorded state
voting.py - classes of equal actions, majority, and the pairs or the reason for none
extraction.py - pairs of votes, state after state, with counts and evidence
groups.py - rollouts of several models on one task: the states they share, their votes and their rewards
submissions.py - what they submitted, by the verdict on it
rows.py - pairs as rows, also all pairs of a group of rollouts
sorting.py - tables joined and sorted on disk
states.py - distinct states with the teachers' actions in them, and who did what in each
patterns.py - what follows from who did the same as whom, found once for all states in which that is the same
labels.py - what student and teachers did in every state, as numbers, and rearrangements of states by task
agreement.py - whether teachers agree beyond chance, and are against the student more than each other
audit.py - what each teacher was worth, and how often outcomes call pairs right
evidence.py - all of that in words and numbers, with a verdict
report.py - what came of it
signal.py - how far apart the words of both sides are, for the record
"""
