"""LightEval: `details_TASK_TIME.parquet`, an item a row with its document and metrics; no transcript.

The score is the first metric of a row. A document is identified by its question. The model is the folder above that of
the time: `details/ORG/MODEL/TIME/details_TASK_TIME.parquet`.

Format read from huggingface/lighteval, `src/lighteval/logging/info_loggers.py` of versions 0.6 and 0.10.
"""

from collections.abc import Iterator
from typing import Any

from composer_stages.formats.base import METRIC, WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory
from composer_stages.formats.reports import task_of
from composer_stages.runs import store

NAME = "lighteval"


def recognises(record: Any) -> bool:
    """Whether a record is a row of details: metrics, and a document or the prompt that was made of it."""
    if not isinstance(record, dict):
        return False
    scored = record.get("metric", record.get("metrics"))
    return isinstance(scored, dict) and ("full_prompt" in record or {"doc", "model_response"} <= record.keys())


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item."""
    document = record.get("doc") or {}
    question = document.get("query") or record.get("example") or record["full_prompt"]
    scored = record["metric"] if "metric" in record else record["metrics"]
    metric, score = next(((name, value) for name, value in scored.items() if value is not None), (None, None))
    task = task_of(origin.path)
    folders = origin.path.parts
    at = folders.index("details") if "details" in folders else len(folders)
    model = "/".join(folders[at + 1 : -2]) or None
    yield Trajectory(
        task_id=f"{task}/{store.digest(question.split())[:12]}",
        env=task,
        family=task,
        model=model,
        statement=question,
        reward=float(score) if isinstance(score, bool | int | float) else None,
        unscored=True,
        extra={METRIC: metric},
    )


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT),)
