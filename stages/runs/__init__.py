"""A run on disk: what a stage reads and writes, and what carries a stage out. Nothing else opens the files of a run.

artifact.py - a run as a stage sees it: `Run` is read, `RunWriter` is written
attempt.py  - one attempt at a stage, from `running` to how it ended
bucket.py   - a folder or bucket: create, read, list, delete, through obstore; what any place of runs can do
config.py   - the settings of a stage
folders.py  - where a run lies, and who holds it
hub_bucket.py - runs on the Hugging Face hub: in a bucket, or finished ones in a dataset
inputs.py   - which run fills which slot
journal.py  - finished units: an open journal and the files it is sealed into
kinds.py    - what a record kind is
ledger.py   - the money of a run: reserved, settled, possibly paid
manifest.py - everything that was asked, read, used, produced and spent
mirror.py   - a run that lies in a bucket while it goes on
outcome_records.py - the record kinds of training and evaluation
pair_records.py - the record kinds of teachers and pairs
parquet.py  - tables, written and read in bounded row groups
plan.py     - what a stage would do, and working through its units
preflight.py - what a run would stumble over, found without one
probe_records.py - the record kinds of the probe
records.py  - the record kinds of the pipeline, and all by name
reporting.py - the backends that a run is logged to besides its own files
remote.py   - finished runs in a bucket: fetched to be read, and published
runner.py   - carries out one stage
scan.py     - a table of a run, not read yet: rows, batches, Arrow, DuckDB, pandas
search.py   - rollouts of a run by what is in them, a page at a time
signals.py  - Ctrl-C and SIGTERM let a stage finish what is under way

spool.py    - lines in a temporary file, read back in any order
spread.py   - units dealt to workers, and taken over from them
store.py    - files that are whole or not there, JSON, lines
tables.py   - the tables of many runs, for questions in SQL
together.py - many small durable writes as few large ones
"""

from stages.runs.artifact import Run, RunWriter

__all__ = ["Run", "RunWriter"]
