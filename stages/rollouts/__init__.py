"""Rollouts: the agent loop, the rows that it writes, and the checks of them.

account.py - what rollouts came to, added up one after the other
episode.py - the agent loop: sample, step, grade; in batches
gate.py - the collection gate: counted checks over rollout and step rows
history.py - how much of a conversation the policy is shown
independent.py - the agent loop for policies on servers: every episode at its own pace
limits.py - what ends an episode early, and how much goes on at once
missing.py - names of what a source may not record
playing.py - plays the episodes of a stage and writes their units
reading.py - rollouts read back from tables, one after the other
states.py - states as rows, each as what it gained, and pairs read with theirs
substrates.py - two substrates of rollouts compared by the gate's checks
trace.py - episodes as rows and journal records, and states read back from rows
turns.py - what a policy is asked next: an action, or a summary
"""
