"""Gradients of every row by what is trained of a model's Linears: the base of the probe, below training.

tokens.py - rows of token ids with the tokens that a policy wrote, and their padded batches
tensors.py - flat vectors of trained numbers by module, and files of tensors
basis.py - the trained numbers in which gradients are measured: singular values or LoRA; folded into a model's weights
per_row.py - each row's own gradient from one backward pass, kept, summed or dotted; the model that is measured
"""
