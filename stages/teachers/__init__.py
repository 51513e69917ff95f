"""Asking teachers what they would have done in recorded states.

table.py - one row of the teacher table: a name and a policy
recorded.py - the distinct states of a run, on disk, and what was said in each
questions.py - one answer to be had, from a recorded state, and its row
asking.py - servers side by side on their own thread, local models in turns beside them
batched.py - questions to a server in batches, found again after a kill
proposing.py - a model asked which features of a package to delete
gate.py - dear teachers only where they can matter
"""
