"""lm-evaluation-harness: `samples_TASK_TIME.jsonl` of `--log_samples`, an item a line, without a transcript.

The score is the first metric that a line names. A document is identified by `doc_hash`, as `doc_id` is a row number.
Where several filters scored the same answers, the lines of the first one are read. The model is in `results_TIME.json`
of the same folder.

Format read from EleutherAI/lm-evaluation-harness, `lm_eval/loggers/evaluation_tracker.py` of version 0.4.9, and files
that it wrote.
"""

from collections.abc import Callable, Iterator
from typing import Any

from stages.formats.base import Drop, NumberedRecord, Origin, Reader, Record, Trajectory
from stages.formats.reports import task_of
from stages.rollouts import missing

NAME = "lm-eval"
METRICS = ("exact_match", "acc", "pass@1", "pass_at_1", "f1")
"""Metrics of lines that name none, which older versions wrote."""


def recognises(record: Any) -> bool:
    """Whether a record is a logged sample: a document, its target and the model's filtered responses."""
    return isinstance(record, dict) and {"doc_id", "doc", "target", "filtered_resps"} <= record.keys()


def of_first_filter(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop]
) -> Iterator[NumberedRecord | Drop]:
    """Yield the lines of the first filter, and drops of the others."""
    first: list[Any] = []
    for record in records:
        used = record[1].get("filter") if not isinstance(record, Drop) and isinstance(record[1], dict) else None
        first = first or ([used] if used else [])
        if used and used != first[0]:
            yield make_drop(record[0], "other_filter", f"{used} scored the same answers as {first[0]}, which is read")  # type: ignore[index]
        else:
            yield record


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item; its score is unknown where the metric is computed over all items."""
    names = record.get("metrics") or [name for name in METRICS if name in record]
    score = record.get(names[0]) if names else None
    task = task_of(origin.path)
    about = origin.sidecars.description(origin.path)
    yield Trajectory(
        task_id=f"{task}/{str(record.get('doc_hash') or record['doc_id'])[:16]}",
        env=task,
        family=task,
        model=about.get("model"),
        reward=float(score) if isinstance(score, int | float) else None,
        unscored=True,
        sampling=about.get("sampling"),
        task_data={"doc": record["doc"]},
        extra={"filter": record.get("filter"), "metric": names[0] if names else None, "doc_id": record["doc_id"]},
    )


READERS = (Reader(NAME, recognises, trajectories, frozenset({missing.STEPS, missing.OPENING}), join=of_first_filter),)
