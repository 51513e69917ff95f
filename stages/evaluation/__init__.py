"""Whether training helped: arms compared on held-out items, with the statistics that decide.

It reads items and plays nothing; `stages.arms` plays them.

In reading order of "why this verdict?":
outcomes.py  - the data: items of arms, paired outcomes of two, what is missing, the rates of one
inference.py - the test of a paired difference, its interval, what it shows, Holm's correction, planned looks
verdict.py   - the decision on an evaluation, with its reasons and what it shows in sentences
arm_settings.py - every setting in which arms differ
planner.py   - what an experiment would show, before it is paid for, and what a finished one could have shown
config.py    - the settings of such a plan
report.py    - verdict and plan as text for a terminal, and a chart of the verdict
"""
