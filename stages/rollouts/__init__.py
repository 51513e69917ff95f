"""Rollouts: the agent loop, the rows that it writes, and the checks of them.

config.py - the settings of playing: limits of a rollout, concurrency
agent_loop.py - play and grade rollouts, in lock step or each at its own pace
history.py - how much of a conversation the policy is shown
recording.py - rollouts written as rows, and restored from them
trace.py - rollouts, states and pairs read from rows
distinct.py - the distinct states of a run, on disk, apart as a stage that writes rollouts needs no database
collection_checks.py - the collection checks, counted over rollout and step rows, and sums for the report
missing.py - names of the facts that a source may not record
"""
