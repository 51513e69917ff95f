"""Compare two sides on each of several benchmarks, and on all of them with equal weights.

A mean over tasks is that of the largest benchmark: a side may be better by it and worse on two of three. The mean over
benchmarks has the interval of independent limits, whose distances add in squares (MOVER: Zou and Donner, Statistics in
Medicine 2008); benchmarks are these and no sample of others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.evaluation.difference import Decision
from composer_stages.evaluation.inference import ALPHA, PairedTest, holm

NAMES = frozenset({"benchmark", "task", "dataset"})
"""Columns before the id that name a benchmark; others, such as a subset, are parts of one."""
BEFORE_ID = re.compile(r"((?:[^\\/]|\\.)*)/", re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True)
class BenchmarkDifference:
    """A difference on one benchmark, or on all with equal weights, in units of the score; p after Holm's correction."""

    benchmark: str
    num_tasks: int
    baseline: float
    treatment: float
    estimate: float
    low: float
    high: float
    p_holm: float | None = None
    decision: Decision = Decision.UNDECIDED


@dataclass(frozen=True)
class BenchmarkTest:
    """The test of one benchmark, and both sides' means as shares of the scale. decides: it has enough units."""

    name: str
    num_tasks: int
    baseline: float
    treatment: float
    test: PairedTest
    decides: bool


def benchmarks_of(log: ReadLog) -> Mapping[str, str]:
    """Return the benchmark of each task by its id; empty where there is one benchmark alone."""
    if log.id_columns[:-1] and log.id_columns[0] in NAMES:
        tasks = pc.unique(log.items["task"]).to_pylist()
        names = {task: ESCAPED.sub(r"\1", found[1]) for task in tasks if (found := BEFORE_ID.match(task))}
    elif len(pc.unique(log.items["env"]).drop_null()) > 1:
        rows = log.items.select(["task", "env"]).group_by(["task"], use_threads=False).aggregate([("env", "first")])
        several = len(pc.unique(rows["env_first"]).drop_null()) > 1
        names = dict(zip(rows["task"].to_pylist(), rows["env_first"].to_pylist(), strict=True)) if several else {}
    else:
        names = {}
    return names if len({*names.values()}) > 1 else {}


def measure(tests: list[BenchmarkTest], width: float, worst: float, alpha: float = ALPHA) -> list[BenchmarkDifference]:
    """Return the difference on each benchmark, the decisions sharing one level, and last that of all alike.

    width, worst: of the scale, from shares to scores; alpha: the level of all decisions together and of the last one.
    """
    adjusted = iter(holm([float(each.test.p()[0]) for each in tests if each.decides]))
    found, below, above = list[BenchmarkDifference](), 0.0, 0.0

    def row(name: str, num_tasks: int, means: Sequence[float], shares: Sequence[float], **rest: Any) -> None:
        estimate, *limits = (width * share for share in shares)
        found.append(
            BenchmarkDifference(name, num_tasks, means[0], means[1], estimate, min(limits), max(limits), **rest)
        )

    for each in tests:
        estimate = float(each.test.estimate_X[0])
        low, high = (float(limit[0]) for limit in each.test.interval(alpha))
        p_holm = next(adjusted) if each.decides else None
        shown = p_holm is not None and p_holm < alpha
        decision = (Decision.BETTER if estimate > 0 else Decision.WORSE) if shown else Decision.UNDECIDED
        means = [worst + width * share for share in (each.baseline, each.treatment)]
        row(each.name, each.num_tasks, means, (estimate, low, high), p_holm=p_holm, decision=decision)
        below, above = below + (estimate - low) ** 2, above + (high - estimate) ** 2
    num = len(tests)
    mean = sum(float(each.test.estimate_X[0]) for each in tests) / num
    low, high = mean - below**0.5 / num, mean + above**0.5 / num
    decision = Decision.BETTER if low > 0 else Decision.WORSE if high < 0 else Decision.UNDECIDED
    means = [sum(means) / num for means in zip(*((each.baseline, each.treatment) for each in found), strict=True)]
    row("", sum(each.num_tasks for each in tests), means, (mean, low, high), decision=decision)
    return found
