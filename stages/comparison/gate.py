"""A release gate: a policy over several scores in one file, and one answer.

The gate passes where every metric of its policy does. A test that needs all of several results to hold is at the level
of each alone, without a correction (intersection-union: Berger, Technometrics 1982): so are those of `not_worse`. What
is called better is a finding by itself, and all of these share one level by Holm's procedure; by more than a number,
by Bonferroni's correction.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from composer_stages.comparison.config import Config
from composer_stages.comparison.decision import LogComparison, compare
from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.measure import holm_level
from composer_stages.comparison.policy import PolicyMetric, read_policy
from composer_stages.errors import UsageError
from composer_stages.evaluation.difference import GAINS, Decision
from composer_stages.evaluation.inference import ALPHA, holm

SETTINGS_OF_POLICY = ("score", "min_gain", "not_worse", "lower_is_better", "outcome", "all_pairs")
"""Settings of `compare` that each metric of a policy has for itself."""


@dataclass(frozen=True)
class MetricResult:
    """What was shown of one metric: whether it passes, None where that is not shown; and the scores of all tasks."""

    metric: PolicyMetric
    passes: bool | None
    comparison: LogComparison
    tasks: pa.Table


def judge(sides: Sequence[ReadLog], config: Config) -> list[MetricResult]:
    """Return what is shown of each metric of the policy."""
    names = [name for name in SETTINGS_OF_POLICY if getattr(config, name) != type(config).model_fields[name].default]
    if names or len(sides) != 2 + (config.noise is not None and len(config.paths) > 1):
        raise UsageError("comparison.policy-with-others", settings=names, sides=len(sides))
    metrics = read_policy(config.policy or "")
    compared = [compare(sides, settings_of(metric, config)) for metric in metrics]
    better = [at for at, metric in enumerate(metrics) if metric.better]
    p_values = [compared[at][0].differences[0].p_value for at in better]
    for number, (at, p_holm) in enumerate(zip(better, holm(p_values), strict=True)):
        if len(better) > 1:
            level = holm_level(p_values, number) if metrics[at].better is True else ALPHA / len(better)
            comparison, tasks = compare(sides, settings_of(metrics[at], config), level)
            difference = replace(comparison.differences[0], p_holm=p_holm)
            compared[at] = replace(comparison, differences=(difference,)), tasks
    return [
        MetricResult(metric, passes(metric, comparison), comparison, tasks)
        for metric, (comparison, tasks) in zip(metrics, compared, strict=True)
    ]


def passes(metric: PolicyMetric, comparison: LogComparison) -> bool | None:
    """Return whether a metric passes; None where neither that nor the opposite is shown."""
    difference = comparison.differences[0]
    if metric.not_worse is not None:
        return difference.not_worse
    if difference.decision not in GAINS or (metric.better is not True and difference.decision is not Decision.BETTER):
        return None if difference.decision is Decision.UNDECIDED else False
    least = -difference.high if comparison.lower_is_better else difference.low
    return True if metric.better is True or least > (metric.better or 0) else None


def all_pass(outcomes: Collection[bool | None]) -> bool | None:
    """Return whether every metric or side passes: False where one is shown not to, None where one is not shown to."""
    return False if False in outcomes else None if None in outcomes else True


def settings_of(metric: PolicyMetric, config: Config) -> Config:
    """Return the settings of a comparison of one metric alone."""
    margin = metric.better if isinstance(metric.better, float) else None
    lower = None if metric.direction is None else metric.direction == "lower"
    changes = {"score": (metric.score,), "not_worse": metric.not_worse, "min_gain": margin, "lower_is_better": lower}
    return config.model_copy(update=changes)
