"""Adapters: where the probe's trainable numbers sit in a model.

layout.py - the trainable numbers of all modules as one flat vector
targets.py - which Linears are adapted
spectrum.py - singular value decompositions, stored and identified by digest
antipasto.py - trainable changes of singular values
rotated.py - the same with turned singular vectors, the adapter of AntiPaSTO
lora.py - low-rank pairs, both halves trainable or one
attach.py - an adapter in a model: as a separate path with autograd, or folded into the weights
names.py - the names of the adapters
choose.py - an adapter by name, and what identifies the coordinates that it works in
tensor_file.py - tensors on disk
"""
