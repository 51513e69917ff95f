"""Gradients: every row's own gradient of an adapter's numbers, by one backward pass, and where they are stored.

per_sample.py - per-sample gradients and log-probs from one backward pass over a batch, with their oracle
student.py - a model with an adapter, loaded and measured in batches; Dr.GRPO's loss and its importance ratios
store.py - gradients of many rows on disk
memory.py - how much memory a stage takes, before anything is loaded
"""
