"""Benchmarks of the checkout: each script measures one thing and writes `results/NAME.json` through `records`.

`records` explains the fields of a record and how to add a benchmark. The folder is a package of its own name, as opacus
installs one that is called `benchmarks`, too.
"""
