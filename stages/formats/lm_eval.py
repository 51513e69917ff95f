"""lm-evaluation-harness: `samples_TASK_TIME.jsonl` of `--log_samples`, an item a document, without a transcript.

Every metric that a line names is a score, under the name that the program has for it, `exact_match,strict-match`: a
file has a line of a document for each filter, which are one item. (Before 2024-11 lines do not name their filter: the
scores are then `exact_match,filter-1` and so on.) A document is identified by `doc_hash`, as `doc_id` is a row number.
`results_TIME.json` of the same folder and time has the model, each metric's direction and aggregation, and the numbers
that the program reports. Metrics over all documents (BLEU, F1, MCC) have no score by document; perplexities have pairs
of log-likelihood and weight.

Format read from EleutherAI/lm-evaluation-harness, `lm_eval/loggers/evaluation_tracker.py`, `evaluator.py` and
`api/metrics.py` of versions 0.4.9 and 0.4.13, and files that it wrote.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_stages.formats.base import (
    FIELDS,
    WITHOUT_TRANSCRIPT,
    Drop,
    NumberedRecord,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
)
from composer_stages.formats.measurement import (
    Aggregate,
    MeasuredLog,
    MeasuredSample,
    Reported,
    ScoreKind,
    as_settings,
    unread,
)
from composer_stages.formats.reports import TIME, task_of, time_of

NAME = "lm-eval"
NAMES: dict[str, Any] = FIELDS[NAME]
AGGREGATIONS = {name: Aggregate[aggregate] for aggregate, names in NAMES["aggregations"].items() for name in names}
"""How a number is made of documents, by the program's name for it; any other is made of all documents at once."""
WEIGHTED = frozenset({Aggregate.PERPLEXITY, Aggregate.BITS})
UNVERSIONED = "Yaml"
"""What stands for the version of a task that declares none."""
BYPASS = "bypass"
"""The metric of `--predict_only`, which is 999 for every document."""
KEPT = ("doc_id", "doc", "doc_hash", "prompt_hash")
"""What is kept of a document's line beside its metrics."""
OF_A_FOLDER = ("model", "sampling", "directions")
"""What the results of another run in the same folder say of a model's samples."""
FILTERS = "filters"


def recognises(record: Any) -> bool:
    """Whether a record is a logged sample: a document, its target and the model's filtered responses."""
    return has_keys(record, "doc_id doc target filtered_resps") or has_keys(record, f"doc_id {FILTERS}")


def of_documents(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop]
) -> Iterator[NumberedRecord | Drop]:
    """Yield one record a document, with the metrics of each filter; drops as they come."""
    documents: dict[tuple[str, int], tuple[int, Record]] = {}
    times = Counter[tuple[str, str]]()
    for record in records:
        if isinstance(record, Drop) or not recognises(record[1]):
            yield record
            continue
        line, sample = record
        fields = {name: sample[name] for name in KEPT if name in sample}
        try:
            values = {
                name: sample.get(name)
                for name in sample.get("metrics") or [each for each in sample if each not in NAMES["of_lines"]]
            }
        except TypeError as error:
            yield make_drop(line, "malformed_record", f"metrics: {error}")
            continue
        identity, used = repr(sample["doc_id"]), str(sample.get("filter") or "")
        # A named filter that scored a document again scored another sample of it.
        time = times[identity, used] if used else 0
        times[identity, used] += 1
        _, document = documents.setdefault((identity, time), (line, fields | {FILTERS: {}}))
        document[FILTERS][used or f"filter-{len(document[FILTERS]) + 1}"] = values
    yield from documents.values()


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one item."""
    about, time = origin.sidecars.description(origin.path), time_of(origin.path)
    if time and about.get(TIME) not in (None, "", time):  # of another run in the folder: its numbers are not of these
        about = {name: about[name] for name in OF_A_FOLDER}
    task = _task(origin, about)
    # A lone filter of older files has no name, neither in the results.
    filters = {
        ("none" if [*record[FILTERS]] == ["filter-1"] else used): values for used, values in record[FILTERS].items()
    }
    names = tuple((metric, used) for used, values in filters.items() for metric in values)
    log = origin.log((task, names), lambda: _log(task, names, about))
    measured = MeasuredSample(asked=str(record.get("prompt_hash") or ""))
    for kind in log.kinds:
        value = filters[kind.filter].get(kind.metric)
        if kind.metric != BYPASS:
            value, weight = (
                value if isinstance(value, list) and len(value) == 2 and kind.aggregate in WEIGHTED else (value, 1.0)
            )
            measured.scores[kind.name] = float(value) if isinstance(value, int | float) else None
            if kind.aggregate in WEIGHTED and isinstance(weight, int | float):
                measured.weights[kind.name] = float(weight)
    if all(value is None for value in measured.scores.values()):
        measured.reason = unread({kind.name: filters[kind.filter].get(kind.metric) for kind in log.kinds})
    yield Trajectory(
        task_id=f"{task}/{(record.get('doc_hash') or _hash(record['doc']))[:16]}",
        env=task,
        family=task,
        model=about.get("model"),
        log=log,
        measured=measured,
        unscored=True,
        sampling=about.get("sampling"),
        task_data={"doc": record["doc"]},
        extra={"doc_id": record["doc_id"]},
    )


def _hash(document: Any) -> str:
    """Return the program's own digest of a document, which lines have since 2024-07."""
    return hashlib.sha256(json.dumps(document, indent=2, ensure_ascii=False).encode()).hexdigest()


def _task(origin: Origin, about: Record) -> str:
    """Return the task of a file; files of before 2024-08 are named after model and task."""
    named, tasks = task_of(origin.path), [*(about.get("results") or {})]
    ends = [task for task in tasks if named.endswith(f"_{task}")]
    return ends[0] if named not in tasks and len(ends) == 1 else named


def _log(task: str, names: tuple[tuple[str, str], ...], about: Record) -> MeasuredLog:
    """Return what a file of samples is of, from the results of its time; the metrics alone where there are none."""
    config = (about.get("configs") or {}).get(task) or {}
    declared = {str(item.get("metric")): item.get("aggregation") for item in config.get("metric_list") or []}
    kinds, reported = list[ScoreKind](), list[Reported]()
    results = (about.get("results") or {}).get(task) or {}
    for metric, used in names:
        aggregation = declared.get(metric) or NAMES["of_metric"].get(metric, "mean")
        aggregate = AGGREGATIONS.get(str(aggregation), Aggregate.OTHER)
        reported_as = f"{metric},{used}"
        name = metric if used == "none" else reported_as
        kinds.append(
            ScoreKind(
                name, metric, filter=used, higher_is_better=_higher_is_better(about, task, metric), aggregate=aggregate
            )
        )
        value = results.get(reported_as, results.get(metric))
        if isinstance(value, int | float) and aggregate is not Aggregate.OTHER and metric != BYPASS:
            reported.append(Reported(name, reported_as, float(value), aggregate, count=results.get("sample_len")))
            reported += _of_groups(name, reported_as, task, about)
    shots = about.get("n-shot") or {}
    settings = {**(about.get("sampling") or {}), **({"num_fewshot": {task: shots[task]}} if task in shots else {})}
    settings |= {name: about.get(name) for name in NAMES["of_results"]}
    settings |= {name: config.get(name) for name in NAMES["of_config"]}
    version = (about.get("versions") or {}).get(task)
    return MeasuredLog(
        NAME,
        str(about.get("lm_eval_version") or ""),
        task,
        "" if version in (None, UNVERSIONED) else str(version),
        about.get("model"),
        tuple(kinds),
        as_settings(settings),
        reported=tuple(reported),
    )


def _of_groups(name: str, reported_as: str, task: str, about: Record) -> Iterator[Reported]:
    """Yield the numbers of a metric of the groups that hold a task."""
    results = {**about["results"], **(about.get("groups") or {})}
    for group in about.get("group_subtasks") or {}:
        value, tasks = results.get(group, {}).get(reported_as), _tasks_of(group, about["group_subtasks"])
        if isinstance(value, int | float) and group != task and task in tasks:
            having = tuple(sorted(each for each in tasks if reported_as in results.get(each, {})))
            yield Reported(name, f"{reported_as} of {group}", float(value), tasks=having)


def _tasks_of(group: str, subtasks: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the tasks of a group and of the groups in it."""
    names, waiting = {group}, [group]
    while waiting:
        children = {*(subtasks.get(waiting.pop()) or ())} - names  # a group may name itself, whatever wrote the file
        names |= children
        waiting += children
    return {name for name in names if not subtasks.get(name)}


def _higher_is_better(about: Record, task: str, metric: str) -> bool | None:
    """Return whether higher values of a metric are better for this task, else for all tasks; None if not recorded."""
    by_task = about.get("directions", {})
    of_task = [by_task[task]] if task in by_task else by_task.values()
    directions = {metrics[metric] for metrics in of_task if metrics.get(metric) is not None}
    return directions.pop() if len(directions) == 1 else None


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT, join=of_documents),)
