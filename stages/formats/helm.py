"""HELM: `per_instance_stats.json` of a run, the statistics of every instance; no transcript.

The score is the first of `METRICS` that an instance has: a run names its main metric in the benchmark's schema alone.
Perturbed copies of instances are left out. The model is in `run_spec.json` of the same folder.

Format read from stanford-crfm/helm, `src/helm/benchmark/metrics/metric.py` and `runner.py` of version 0.5.
"""

from collections.abc import Iterator
from typing import Any

from stages.formats.base import Drop, Origin, Reader, Record, Trajectory
from stages.rollouts import missing

NAME = "helm"
METRICS = (
    *("exact_match", "quasi_exact_match", "prefix_exact_match", "quasi_prefix_exact_match", "final_number_exact_match"),
    *(
        "pass",
        "test_avg",
        "math_equiv",
        "math_equiv_chain_of_thought",
        "exact_match@5",
        "f1_score",
        "rouge_l",
        "bleu_4",
    ),
)


def recognises(record: Any) -> bool:
    """Whether a record is an instance with its statistics."""
    return isinstance(record, dict) and {"instance_id", "train_trial_index", "stats"} <= record.keys()


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """Yield one item, or the drop of a perturbed copy."""
    if record.get("perturbation"):
        yield origin.make_drop("perturbed", f"a copy of {record['instance_id']}: {record['perturbation'].get('name')}")
        return
    means = {stat["name"]["name"]: stat.get("mean") for stat in record["stats"]}
    metric = next((name for name in METRICS if means.get(name) is not None), None)
    about = origin.sidecars.description(origin.path)
    env = str(about.get("env") or origin.path.parent.name).partition(":")[0]
    yield Trajectory(
        task_id=f"{env}/{record['instance_id']}",
        env=env,
        model=about.get("model"),
        reward=None if metric is None else float(means[metric]),
        unscored=True,
        extra={"metric": metric, "trial": record["train_trial_index"]},
    )


READERS = (Reader(NAME, recognises, trajectories, frozenset({missing.STEPS, missing.OPENING})),)
