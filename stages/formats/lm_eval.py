"""lm-evaluation-harness: `samples_TASK_TIME.jsonl` of `--log_samples`, an item a line, without a transcript.

The score is the first metric that a line names. A document is identified by `doc_hash`, as `doc_id` is a row number.
Where several filters scored the same answers, the lines of the first one are read. The model, and whether a higher
value of a metric is better, are in `results_TIME.json` of the same folder and time.

Format read from EleutherAI/lm-evaluation-harness, `lm_eval/loggers/evaluation_tracker.py` of version 0.4.9, and files
that it wrote.
"""

from collections.abc import Callable, Iterator
from typing import Any

from composer_stages.formats.base import (
    HIGHER_IS_BETTER,
    METRIC,
    WITHOUT_TRANSCRIPT,
    Drop,
    NumberedRecord,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
)
from composer_stages.formats.reports import task_of
from composer_stages.words import Sentence

NAME = "lm-eval"
METRICS = ("exact_match", "acc", "pass@1", "pass_at_1", "f1")
"""Metrics of lines that name none, which older versions wrote."""


def recognises(record: Any) -> bool:
    """Whether a record is a logged sample: a document, its target and the model's filtered responses."""
    return has_keys(record, "doc_id doc target filtered_resps")


def of_first_filter(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop]
) -> Iterator[NumberedRecord | Drop]:
    """Yield the lines of the first filter, and drops of the others."""
    first: list[Any] = []
    for record in records:
        used = record[1].get("filter") if not isinstance(record, Drop) and isinstance(record[1], dict) else None
        first = first or ([used] if used else [])
        if used and used != first[0]:
            yield make_drop(record[0], "other_filter", Sentence("formats.other-filter", used=used, first=first[0]))  # type: ignore[index]
        else:
            yield record


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item; its score is unknown if the metric is computed over all items."""
    names = record.get("metrics") or [name for name in METRICS if name in record]
    metric = names[0] if names else None
    score = None if metric is None else record.get(metric)
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
        extra={"filter": record.get("filter"), "doc_id": record["doc_id"]}
        | {METRIC: metric, HIGHER_IS_BETTER: _higher_is_better(about, task, metric)},
    )


def _higher_is_better(about: Record, task: str, metric: str | None) -> bool | None:
    """Return whether higher values of a metric are better for this task, else for all tasks; None if not recorded."""
    by_task = about.get(HIGHER_IS_BETTER, {})
    # Files of before 2024-08 are named after model and task.
    of_task = [by_task[task]] if task in by_task else by_task.values()
    directions = {metrics[metric] for metrics in of_task if metrics.get(metric) is not None}
    return directions.pop() if len(directions) == 1 else None


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT, join=of_first_filter),)
