"""Comparing evaluation logs: which of two models, prompts or programs did better on the same tasks.

stage.py     - what `compare` does, and what it writes
config.py    - its settings
logs.py      - logs of any program as tables of items
tables.py    - CSV, JSON Lines and Parquet with an id and a score a row
sides.py     - the sides of a comparison by name, and the same tasks under one name
direction.py - whether lower scores are better
reconciliation.py - each side beside the numbers that its own program reports
benchmarks.py - several benchmarks: a decision for each, and their mean with equal weights
decision.py  - sides measured against the first, and decided
words.py     - the sentences of comparison.jinja about a comparison
report.py    - the result as text for a terminal, and as one page
"""
