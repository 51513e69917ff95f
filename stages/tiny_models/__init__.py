"""Small models that act in the built-in environments: trained in seconds, then loaded like any Hugging Face folder.

folders.py - model folders built on first use, training schedules, widths of attention heads
training.py - an untrained model, a plain loop of supervised training, byte-level BPE with a chat template
"""
