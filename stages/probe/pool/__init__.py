"""The pool: recorded or played answers with their labels, as rows of tokens, and the pairs that a direction comes from.

tokens.py - token rows and their padded batches
transcripts.py - conversations, texts and episodes as token rows
pair_source.py - hack/clean pairs
rows.py - pool rows, of episodes and of recorded files
run_rows.py - pool rows of rollouts that a run of another stage holds
step_files.py - the rows and the diagnostics of one step on disk
"""
