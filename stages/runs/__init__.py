"""A run on disk: what a stage reads and writes, and what executes a stage. Nothing else opens the files of a run.

artifact.py - a run as a stage sees it: `Run` is read, `RunWriter` is written
bucket.py   - runs in a bucket or on the Hugging Face hub: fetched, published, uploaded while they run
config.py   - the settings of a stage
journal.py  - finished units: an open journal and the files it is sealed into
ledger.py   - the money of a run: reserved, settled, possibly paid
manifest.py - everything that was asked, read, used, produced and spent
parquet.py  - tables, written and read in bounded row groups
queries.py  - rollouts by text and outcome, and the tables of many runs in SQL
records.py  - the record kinds of all stages
reporting.py - the backends that a run is logged to besides its own files
runner.py   - executes one stage
signals.py  - Ctrl-C and SIGTERM stop a stage between two units
spread.py   - units dealt to workers, and merged from them
stage.py    - what a stage is, what it plans, which runs it reads
store.py    - files that are complete or absent, JSON, lines, group commits
"""

from stages.runs.artifact import Run, RunWriter

__all__ = ["Run", "RunWriter"]
