"""LightEval: `details_TASK_TIME.parquet`, an item a row with its document and metrics; no transcript.

Every metric of a row is a score. A document is identified by its question. The model is the folder above that of the
time: `details/ORG/MODEL/TIME/details_TASK_TIME.parquet`. What the program reports is in
`results/ORG/MODEL/results_TIME.json` beside the folder of details.

Format read from huggingface/lighteval, `src/lighteval/logging/info_loggers.py` of versions 0.6 and 0.10.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_stages import json_text
from composer_stages.formats.base import FIELDS, WITHOUT_TRANSCRIPT, Origin, Reader, Record, Trajectory
from composer_stages.formats.measurement import (
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    ScoreKind,
    as_settings,
    told,
    unread,
)
from composer_stages.formats.reports import task_of
from composer_stages.runs import store

NAME = "lighteval"
MEANS = ("mean", "average", "nanmean")
"""Functions that make the mean of samples."""


def recognises(record: Any) -> bool:
    """Whether a record is a row of details: metrics, and a document or the prompt that was made of it."""
    if not isinstance(record, dict):
        return False
    scored = _parsed(record.get("metric", record.get("metrics")))
    return isinstance(scored, dict) and ("full_prompt" in record or {"doc", "model_response"} <= record.keys())


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item."""
    document = _parsed(record.get("doc")) or {}
    asked = document.get("query") if isinstance(document, dict) else document
    question = asked or record.get("example") or record["full_prompt"]
    scored = _parsed(record["metric"] if "metric" in record else record["metrics"])
    task = task_of(origin.path)
    folders = origin.path.parts
    at = folders.index("details") if "details" in folders else len(folders)
    model = "/".join(folders[at + 1 : -2]) or None
    results = Path(*folders[:at], "results", *folders[at + 1 : -2], origin.path.name)
    names = tuple(scored)
    scores = {name: float(value) if isinstance(value, bool | int | float) else None for name, value in scored.items()}
    yield Trajectory(
        task_id=f"{task}/{store.digest(question.split())[:12]}",
        env=task,
        family=task,
        model=model,
        statement=question,
        log=origin.log((task, names), lambda: _log(task, model, names, origin.sidecars.description(results))),
        measured=MeasuredSample(scores, reason="" if any(v is not None for v in scores.values()) else unread(scored)),
        unscored=True,
    )


def _parsed(value: Any) -> Any:
    """Return a column that is the text of a dict as the dict: so they are all written where one cannot be as it is."""
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        with suppress(ValueError):
            return json_text.literal(value)
    return value


def _log(task: str, model: str | None, names: tuple[str, ...], about: Record) -> MeasuredLog:
    """Return what a file of details is of."""
    results, general = (about.get("results") or {}).get(task) or {}, about.get("config_general") or {}
    # To version 0.9 by the task without the number of its examples.
    of_tasks = about.get("config_tasks") or {}
    configured = of_tasks.get(task) or of_tasks.get(task.rpartition("|")[0]) or {}
    ways = {name: way for name, way in _declared(configured, "higher_is_better").items() if isinstance(way, bool)}
    aggregates = _declared(configured, "corpus_level_fn")
    settings = {name: general.get(name) for name in ("num_fewshot_seeds", "max_samples", "generation_parameters")}
    settings |= {name: configured.get(name) for name in FIELDS[NAME]["of_task"]}
    count = configured.get("effective_num_docs")
    # A number of another function, such as the highest score, is none that samples are compared by.
    averaged = [name for name in names if aggregates.get(name, "mean") in MEANS]
    reported = (r for name in averaged for r in told(name, name, results.get(name), Aggregate.SAMPLES, count=count))
    version = (about.get("versions") or {}).get(task)
    return MeasuredLog(
        NAME,
        str(general.get("lighteval_sha") or ""),
        task,
        "" if version is None else str(version),
        model,
        tuple(ScoreKind(name, name, higher_is_better=ways.get(name)) for name in names),
        as_settings(settings),
        reported=tuple(reported),
    )


def _declared(configured: Record, field: str) -> dict[str, Any]:
    """Return a field of a task's metrics by their names; metrics that are computed together have one each."""
    metrics = [item for item in configured.get("metrics") or configured.get("metric") or [] if isinstance(item, dict)]
    values = {str(item.get("metric_name")): item[field] for item in metrics if item.get(field) is not None}
    return values | {name: each for group in values.values() if isinstance(group, dict) for name, each in group.items()}


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT),)
