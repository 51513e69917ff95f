"""Whether training helped: arms compared on held-out items, with the statistics that decide.

arms.py       - which models are compared, their rollouts as items, the rates of one arm
differences.py - every setting in which arms differ
comparison.py - items of two arms as a comparison: paired, lost outcomes bounded, subsets tested, planned looks
flips.py      - the deciding test: studentised sign flips, and the interval that they give
paired.py     - outcomes of two arms as statistics of that test, training seeds on top, for one experiment or many
stats.py      - the paired difference of two arms and the rate of one, with interval and p-value
verdict.py    - evaluation items in, a verdict with its reasons out
report.py     - the verdict as text for a terminal, and as a chart
planner.py    - what an experiment would show, before it is paid for
projected.py  - the effect of projecting a hack direction out of training, next to its controls
"""
