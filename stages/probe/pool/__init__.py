"""The pool: recorded or played answers with their labels, as rows of tokens.

tokens.py - token rows and their padded batches, from texts, conversations, episodes and recorded rollouts
rows.py - pool rows of episodes, of other runs' rollouts and of recorded files; the files of a step
"""
