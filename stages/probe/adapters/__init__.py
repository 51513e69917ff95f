"""Adapters: where the probe's trainable numbers are in a model.

attach.py - the interface of an adapter, its layout as one flat vector, and ways to run it in a model
spectrum.py - singular value decompositions, stored and identified by digest; tensors on disk
antipasto.py - trainable changes of singular values, alone or with turned singular vectors
lora.py - low-rank pairs, both halves trainable or one; LoRAs of PEFT
choose.py - an adapter by name, and what identifies its coordinates
names.py - names of adapters, projections and arms
"""
