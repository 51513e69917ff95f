"""A run on disk: what a stage reads and writes, and what executes a stage. Nothing else opens the files of a run.

activity.py - what a stage does between two units, for its progress
sql.py      - a question in SQL about tables of many runs, in a thread of its own with bounds
bucket.py   - runs in a bucket or on the Hugging Face hub: fetched, published, uploaded while they run
catalog.py  - the runs below an artifacts folder: found by name, chosen as inputs, followed to what they read
index.py    - the facts of all these runs for lists, kept in a file as long as their manifests do not change
display.py  - short tables of runs, plans and tables, in terminals and notebooks
hub.py      - whether the Hugging Face hub answers
kinds.py    - the record kinds of all stages, whose columns are in kinds.toml
ledger.py   - the money of a run: reserved, settled, possibly paid
queries/    - pages of rollouts, of arms task by task, and of pairs of one run
reporting.py - the backends that a run is logged to besides its own files
run.py      - the folder of a run: its manifest, and the files that `Run` reads and `RunWriter` writes
runner.py   - executes one stage: the run that its work resolves to, one attempt, and its end
settings.py - settings: groups of fields, and the layers from which a configuration is built
spread.py   - units dealt to workers, and merged from them
stage.py    - what a stage is, what it plans, which of a file's settings it takes
store.py    - files that are complete or absent, JSON, lines, group commits, the journal of finished units
tables.py   - tables, written and read in bounded row groups
"""

from composer_stages.runs.run import Run, RunWriter

__all__ = ["Run", "RunWriter"]
