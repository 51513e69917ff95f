"""Rollouts: the agent loop, the rows that it writes, and the checks of them.

episode.py - the agent loop: sample, step, grade
gate.py - the collection gate: counted checks over rollout and step rows
missing.py - names of what a source may not record
substrates.py - two substrates of rollouts compared by the gate's checks
trace.py - episodes as rows and journal records, and states read back from rows
"""
