"""What there is to see of runs: `composer status`, `composer show`, `composer query`.

parity.py      - kernels and upstream's functions beside the recorded numbers
follow.py      - episodes that are being played
query.py       - questions in SQL about the tables of runs
runs.py        - finding runs
show.py        - one run for people to read
status.py      - what became of each run
transcripts.py - rollouts as people read them
"""
