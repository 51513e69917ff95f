"""The probe's ten figures.

figure_data.py - what each figure shows, as rows of numbers
figures.py - those rows as CSV and as PNG
watch_figure.py - the figure of a watched training
"""
