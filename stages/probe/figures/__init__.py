"""The figures of the probe.

figure_data.py - what each figure of `probe plot` shows, as rows of numbers
figures.py - those rows as CSV and as PNG, and the figure of a watched training
"""
