"""Gradients: every row's own gradient of an adapter's numbers, by one backward pass, and where they are stored.

per_sample.py - per-sample gradients and log-probs from one backward pass over a batch
reference_gradients.py - the same the slow way, one row at a time, as an oracle
student.py - a model with an adapter, loaded and measured in batches
surrogate.py - Dr.GRPO's loss by rows, and what its importance ratios say
store.py - gradients of many rows on disk
merge.py - a PEFT LoRA added to a model
memory.py - how much memory a stage takes, before anything is loaded
tiny.py - a very small Qwen3 with random weights
"""
