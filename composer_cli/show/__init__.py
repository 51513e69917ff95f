"""Read runs and render them as text: `composer show`, `status` and `query`; the facts behind `report` and `view`.

runs.py     - the list of runs with their status and damage
facts.py    - facts of one run: manifest, progress, metrics, first rows
rollout.py  - one rollout, or one item of an evaluation, with its messages and steps; the columns of its outcome
blocks.py   - the blocks of a section: findings, tables, intervals, curves, figures, dialogues
sections.py - the section about a run: the blocks that answer the question of its stage
verdicts.py - the blocks about an evaluation or a comparison of logs
text.py     - runs, rollouts and answers as text
command.py  - `composer show`: print a job, a run or one rollout
follow.py   - live rollouts and training steps
"""
