"""Directions: what points from clean to hack among gradients, how rows lie on it, and how to take it out.

preparation.py - where an adapter starts, if the pairs decide it
extraction.py - a direction from pairs' gradients
pair_gradients.py - pairs' gradients and tokens in a direction run, and what each module's direction is worth
v_hack.py - a direction on disk, refused in other coordinates
metrics.py - how much of a gradient lies along a direction, and what chance would give
placebos.py - directions without meaning, to compare with
scoring.py - stored gradients scored with a direction and its placebos
measure.py - probe rows: the metrics of one step's rows
streamed.py - the same metrics and one sum, without keeping any row's gradient
modes.py - the projection modes of an arm, and how theta moves
projection.py - taking a direction out of a gradient, and measuring that it is out
drift.py - does a direction keep its meaning while the student moves?
"""
