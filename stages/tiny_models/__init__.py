"""Small models that act in the embedded environments: trained in seconds, then loaded like any Hugging Face folder.

folders.py - made on first use, by one process, whole
heads.py - attention heads of a width that vLLM knows
schedule.py - how long and how fast a small model is trained
tokenizer.py - byte-level BPE with a chat template
training.py - an untrained model and a plain loop of supervised training
"""
