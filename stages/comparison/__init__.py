"""Comparing evaluation logs: which of two models, prompts or programs did better on the same tasks.

stage.py     - what `compare` does, and what it writes
config.py    - its settings
logs.py      - logs of any program as tables of items
tables.py    - CSV, JSON Lines and Parquet with an id and a score a row, by the columns of columns.toml
sides.py     - the sides of a comparison by name, and the same tasks under one name
direction.py - whether lower scores are better
reconciliation.py - each side beside the numbers that its own program reports
pairs.py     - one row a task, and two sides paired by task
measure.py   - a family of differences measured and decided at one level: sides, benchmarks, categories
decision.py  - sides compared with the first, or all pairs of them, with all that stands beside a decision
ranks.py     - positions of several sides, by all pairs
costs.py     - money and tokens beside quality, for a sample and for a success
repeats.py   - how large a difference repeats alone make
clusters.py  - what tasks share, and what resampling them together would change
policy.py    - the file of a release gate: what has to be shown of each score
gate.py      - a release gate: all metrics of a policy, and one answer
words.py     - the sentences of comparison.jinja about a comparison
report.py    - the result as text for a terminal, and as one page (page.jinja)
"""
