"""Whether training helped: arms compared on held-out items, with the statistics that decide.

It reads items and plays nothing; `composer_stages.arms` plays them.

In reading order of "why this verdict?":
outcomes.py  - the data: items of arms, paired outcomes of two, what is missing, the rates of one
inference.py - the test of a paired difference, its interval, the rule that decides, Holm's correction, planned looks
difference.py - the record of a difference, its decision and reasons
measurement.py - paired outcomes measured as a difference
arm_comparison.py - two arms compared in an outcome, and all questions besides the planned ones
verdict.py   - the decision on an evaluation, with its reasons
arm_settings.py - every setting in which arms differ

A verdict for people:
sentences.py - templates of sentences, filled from records
words.py     - the sentences of verdict.jinja about a verdict
document.py  - `verdict.json`, written and read
report.py    - text for a terminal, and a chart
task_rates.py - pass rates by task, for the reports of `collect` and `show`

What an experiment would show, before it is paid for, and what a finished one could have shown:
task_model.py - rates of rollouts, and the correlations that follow
pilot.py     - rates measured on a pilot
design.py    - experiments drawn from the task model, and decided
planner.py   - designs studied
config.py    - the settings of a plan
plan_report.py - a study as text for a terminal, with the sentences of plan.jinja
"""
