"""Whether training helped: arms compared on held-out items, with the statistics that decide.

arms.py       - the arms of an experiment as items: can two be compared, the rates of one
chart.py      - pass@1 of every arm and the differences with their intervals, as SVG
comparison.py - items of two arms as a comparison: paired, lost outcomes bounded, subsets tested
flips.py      - the test that decides: studentised sign flips, and the interval that they give
items.py      - rollouts of arms as items, and which of them one worker plays
lineup.py     - which models are compared: checkpoints, models of the settings, rollouts played earlier
looks.py      - planned looks at an evaluation that is still going on, and the level of each
paired.py     - outcomes of two arms as what the test needs, training seeds on top, for one experiment or many
pilot.py      - what a pilot says of the tasks: rates for a plan
planner.py    - what an experiment would show, before it is paid for
planning.py   - what a plan assumes and asks, and its answer
projected.py  - what taking a hack direction out of training did, beside its controls
report.py     - the verdict as text for a terminal
simulation.py - experiments that have not been run: outcomes from a model of tasks, and what would be decided
stats.py      - the paired difference of two arms and the rate of one, with interval and p-value
verdict.py    - evaluation items in, a verdict with its reasons out
wording.py    - the words of a verdict, one sentence a question
"""
