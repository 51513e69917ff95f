"""What runs hold, for people: `composer show`, `status`, `query`, and the facts behind `report` and `view`.

runs.py   - find runs, choose a stage's inputs, list runs with their status, follow what was made from what
facts.py  - what one run tells: manifest, how far it is, metrics, transcripts, rows; as values and as text
rollout.py - one rollout, or one item of an evaluation, with its messages and steps; the columns of its outcome
text.py    - runs, rollouts and answers as text
conclusions.py - what an evaluation shows and does not show, in sentences
follow.py - live episodes and training steps
"""
