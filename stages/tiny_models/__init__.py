"""Small models that act in the built-in environments: trained in seconds, then loaded like any Hugging Face folder.

folders.py - model folders built on first use
"""
