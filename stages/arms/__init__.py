"""Models that are played to be compared: the arms of an evaluation, and a student with and without hints.

config.py - the settings of `evaluate`
stage.py - what `evaluate` does: its plan, its run, the share of a worker, the study of a planned run
hint_check.py - before a training, whether hints make the model that is trained a better teacher of itself

What was played is judged by `composer_stages.evaluation`, which needs no model and no environment.
"""
