"""Directions: what points from clean to hack among gradients, how rows lie on it, and how to take it out.

extraction.py - a direction from pairs' gradients, on disk, and refused in other coordinates
metrics.py - metrics of gradients along a direction, the rows of a step, and how far a student has moved
scoring.py - placebo directions, and stored gradients scored with v and its placebos
projection.py - an optimiser step that takes a direction out, and measures that it is out
"""
