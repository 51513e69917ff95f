"""Whether training helped: arms compared on held-out items, with the statistics that decide.

arms.py    - the arms of an experiment as items: can two be compared, their paired difference, the rates of one
chart.py   - pass@1 of every arm with its interval, as SVG
power.py   - what a number of tasks can see, before it is paid for
stats.py   - intervals, tests and minimal detectable effects of paired experiments
verdict.py - evaluation items in, a verdict with its reasons out
"""
