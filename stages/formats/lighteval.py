"""LightEval: `details_TASK_TIME.parquet`, an item a row with its document and metrics; no transcript.

Every metric of a row is a score. A document is identified by its question. The model is the folder above that of the
time: `details/ORG/MODEL/TIME/details_TASK_TIME.parquet`. What the program reports is in
`results/ORG/MODEL/results_TIME.json` beside the folder of details.

Format read from huggingface/lighteval, `src/lighteval/logging/info_loggers.py` of versions 0.6 and 0.10.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def _log(task: str, model: str | None, names: tuple[str, ...], about: Record) -> MeasuredLog:
    """Return what a file of details is of."""
    results, general = (about.get("results") or {}).get(task) or {}, about.get("config_general") or {}
    configured = (about.get("config_tasks") or {}).get(task) or {}
    declared = [item for item in configured.get("metrics") or configured.get("metric") or [] if isinstance(item, dict)]
    directions = {str(item.get("metric_name")): item.get("higher_is_better") for item in declared}
    # Metrics that are computed together have a direction each.
    directions |= {name: way for table in directions.values() if isinstance(table, dict) for name, way in table.items()}
    ways = {name: way for name, way in directions.items() if isinstance(way, bool)}
    settings = {name: general.get(name) for name in ("num_fewshot_seeds", "max_samples", "generation_parameters")}
    settings |= {name: configured.get(name) for name in FIELDS[NAME]["of_task"]}
    count = configured.get("effective_num_docs")
    reported = (r for name in names for r in told(name, name, results.get(name), Aggregate.SAMPLES, count=count))
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


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT),)
