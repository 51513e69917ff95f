"""Comparing evaluation logs: which of two models, prompts or programs did better on the same tasks.

stage.py     - what `compare` does: sides, differences, the decision
config.py    - its settings
logs.py      - logs of any program as tables of items, and the same tasks under one name
direction.py - whether lower scores are better
report.py    - the result as text for a terminal, and as one page
"""
