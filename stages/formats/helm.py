"""HELM: `per_instance_stats.json` of a run, the statistics of every instance; no transcript.

A run's main metric is in the schema of its leaderboard alone: here it is that of its scenario where the schemas of HELM
Classic and Lite name another one than the first of `METRICS` that an instance has. Schemas say of a metric whether
lower is better. An instance without any of these metrics has all statistics that are not about it (`ABOUT`) as scores.
Where a run has instances of the
test split, those of the validation split are left out, as HELM's own tables do; so are perturbed copies. An instance
is named by its scenario with its arguments, as every subject numbers its own. The model is in `run_spec.json`.

Format read from stanford-crfm/helm, `src/helm/benchmark/metrics/metric.py` and `runner.py` of version 0.5, and three
runs of it in evaleval/every_eval_ever, `tests/data/helm/`.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from composer_stages.formats.base import (
    FIELDS,
    MALFORMED,
    WITHOUT_TRANSCRIPT,
    Drop,
    NumberedRecord,
    Origin,
    Reader,
    Record,
    Trajectory,
    has_keys,
)
from composer_stages.formats.measurement import Aggregate, MeasuredLog, MeasuredSample, Reported, ScoreKind, as_settings
from composer_stages.formats.reports import STATS
from composer_stages.runs import store
from composer_stages.words import Sentence

NAME = "helm"
NAMES: dict[str, Any] = FIELDS[NAME]
METRICS: list[str] = [*NAMES["metrics"], *NAMES["lower"]]
LOWER, ABOUT = (frozenset(NAMES[name]) for name in ("lower", "about"))
MAIN = {scenario: metric for metric, scenarios in NAMES["main"].items() for scenario in scenarios}
"""The main metric by scenario."""


def recognises(record: Any) -> bool:
    """Whether a record is an instance with its statistics."""
    return has_keys(record, "instance_id train_trial_index stats")


def of_main_split(
    records: Iterator[NumberedRecord | Drop], make_drop: Callable[[int, str, str], Drop]
) -> Iterator[NumberedRecord | Drop]:
    """Yield the instances of the test split, and drops of the others; all of them where none is of the test split.

    Each class of metrics of a run writes an entry for an instance, which HELM joins (`benchmark/runner.py`): so here.
    """
    split_records = [(record, None if isinstance(record, Drop) else _split(record[1])) for record in _joined(records)]
    has_test = any(split == "test" for _, split in split_records)
    for record, split in split_records:
        if has_test and split not in (None, "test"):
            yield make_drop(record[0], "other_split", Sentence("formats.other-split", split=split))  # type: ignore[index]
        else:
            yield record


def _joined(records: Iterator[NumberedRecord | Drop]) -> list[NumberedRecord | Drop]:
    """Return the records with all statistics of an instance in its first one."""
    first: dict[str, Record] = {}
    joined: list[NumberedRecord | Drop] = []
    for item in records:
        if not isinstance(item, Drop) and recognises(item[1]) and isinstance(item[1]["stats"], list):
            instance = store.digest(
                [item[1].get(name) for name in ("instance_id", "perturbation", "train_trial_index")]
            )
            if instance in first:
                first[instance]["stats"] += item[1]["stats"]
                continue
            first[instance] = record = {**item[1], "stats": [*item[1]["stats"]]}
            item = item[0], record
        joined.append(item)
    return joined


def _split(record: Any) -> str | None:
    """Return the split of an instance, which its statistics name."""
    with suppress(*MALFORMED):
        return next((stat["name"]["split"] for stat in record["stats"] if stat["name"].get("split")), None)
    return None


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield one item, or the drop of a perturbed copy."""
    if record.get("perturbation"):
        yield origin.make_drop("perturbed", f"a copy of {record['instance_id']}: {record['perturbation'].get('name')}")
        return
    means = {stat["name"]["name"]: stat.get("mean") for stat in record["stats"]}
    about = origin.sidecars.description(origin.path)
    env, _, arguments = str(about.get("env") or origin.path.parent.name).partition(":")
    scenario_arguments = ",".join(
        argument for argument in arguments.split(",") if argument and not argument.startswith("model=")
    )
    family = f"{env}:{scenario_arguments}" if scenario_arguments else env
    main = next((name for name in (MAIN.get(env), *METRICS) if name and means.get(name) is not None), None)
    recorded = [name for name, mean in means.items() if mean is not None and name not in ABOUT]
    names = tuple(sorted({*recorded} & {*METRICS}, key=METRICS.index)) or tuple(recorded)
    split, stats = _split(record), origin.sidecars.descriptions.get((origin.path.parent, STATS), {}).get(STATS, [])
    log = origin.log((family, names), lambda: _log(family, names, main, about, split, stats))
    yield Trajectory(
        task_id=f"{family}/{record['instance_id']}",
        env=env,
        family=family,
        split=split,
        model=about.get("model"),
        log=log,
        measured=MeasuredSample({name: float(means[name]) for name in names}, epoch=record["train_trial_index"]),
        unscored=True,
        extra={"trial": record["train_trial_index"]},
    )


def _log(
    family: str, names: tuple[str, ...], main: str | None, about: Record, split: str | None, stats: list[Record]
) -> MeasuredLog:
    """Return what a run is of."""
    # The schemas say whether lower values are better; of a metric that they do not have, nobody does.
    ways = {name: name not in LOWER for name in METRICS}
    kinds = tuple(ScoreKind(name, name, higher_is_better=ways.get(name), main=name == main) for name in names)
    reported = [
        Reported(stat["name"]["name"], "mean", float(stat["mean"]), Aggregate.SAMPLES)
        for stat in stats
        if stat["name"].get("name") in names and stat["name"].get("split") == split and stat.get("mean") is not None
        # There is a number for each part of the split, too.
        if not stat["name"].get("perturbation") and not stat["name"].get("sub_split")
    ]
    adapter = {"num_fewshot": about.get("max_train_instances")} | {name: about.get(name) for name in NAMES["adapter"]}
    return MeasuredLog(
        NAME,
        task=family,
        model=about.get("model"),
        kinds=kinds,
        settings=as_settings(adapter),
        reported=tuple(reported),
    )


READERS = (Reader(NAME, recognises, trajectories, WITHOUT_TRANSCRIPT, join=of_main_split),)
