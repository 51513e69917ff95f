"""Gradients of every row by the trained parameters of a model's Linears: the base of the probe, below training.

tensors.py - flat vectors of trained numbers by module, and files of tensors
basis.py - the trained numbers in which gradients are measured: singular values or LoRA; folded into a model's weights
per_row.py - rows of token ids, each row's own gradient from one backward pass, and the model that is measured
"""
