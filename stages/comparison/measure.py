"""Measure and decide a family of differences, which share one level: sides, benchmarks, or categories of tasks.

A decision has the level that Holm's procedure gives it in its family, and its interval is at the same level. What it
says of a margin is at Bonferroni's level: Holm's are those of "no difference", which sides that differ by the margin
would reject one after the other, until the last is tested at the level of one test.

A mean over tasks is that of the largest benchmark: a side may be better by it and worse on two of three. The mean over
benchmarks has the interval of independent limits, whose distances add in squares (MOVER: Zou and Donner, Statistics in
Medicine 2008); benchmarks are these and no sample of others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.pairs import ComparisonRules, PairedSides
from composer_stages.evaluation.difference import Decision, Difference, MissingOutcomes, Quantity, Reason, ReasonKind
from composer_stages.evaluation.inference import ALPHA, Array, PairedTest, decide_difference, holm
from composer_stages.evaluation.measurement import measure_difference
from composer_stages.evaluation.outcomes import PairedOutcomes

BENCHMARKS = frozenset({"benchmark", "task", "dataset"})
"""Columns before the id that name a benchmark; others, such as a subset, are parts of one."""
BEFORE_ID = re.compile(r"((?:[^\\/]|\\.)*)/", re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)
MOST_CATEGORIES = 60


@dataclass(frozen=True)
class Case:
    """Two sides on the same tasks, and the tests that must agree on the decision."""

    outcomes: PairedOutcomes
    tests: Sequence[PairedTest]
    treatment: str
    baseline: str = ""


@dataclass(frozen=True)
class Part:
    """A difference on a part of the tasks, or on all parts with equal weights, in units of the score.

    p_holm: after Holm's correction; None where too few units show nothing.
    """

    name: str
    num_tasks: int
    baseline: float
    treatment: float
    estimate: float
    low: float
    high: float
    p_holm: float | None
    decision: Decision


def measure_family(
    cases: Sequence[Case], rules: ComparisonRules, alpha: float = ALPHA, *, equal_levels: bool = False
) -> list[Difference]:
    """Return the difference of each case in units of the score, all of them at one level together.

    A case with too few units to show anything takes no share of the level. equal_levels: by Bonferroni's correction.
    """
    p_values = [joint_p_value(case.tests) for case in cases]
    able = able_cases(cases, rules, alpha)
    tested, margin_alpha = [p_values[at] for at in able], equal_level(cases, rules, alpha)
    if equal_levels:
        adjusted = {at: min(1.0, p_values[at] * len(able)) for at in able}
        levels = dict.fromkeys(able, margin_alpha)
    else:
        adjusted = dict(zip(able, holm(tested), strict=True))
        levels = {at: holm_level(tested, number, alpha) for number, at in enumerate(able)}
    differences = []
    for at, case in enumerate(cases):
        level = levels.get(at, alpha)
        difference = measure_difference(
            case.outcomes,
            case.tests,
            min_gain=rules.min_share,
            alpha=level,
            margin_alpha=margin_alpha,
            p_value=p_values[at],
            fewest=rules.fewest_units(level),
            two_sided=True,
            fixed=rules.fixed,
            rate="score",
            treatment=case.treatment,
            baseline=case.baseline,
            unit=rules.unit.noun if rules.unit else "task",
            p_holm=adjusted.get(at, p_values[at]),
        )
        differences.append(explain(difference, case.tests, rules))
    return differences


def able_cases(cases: Sequence[Case], rules: ComparisonRules, alpha: float) -> list[int]:
    """Return the numbers of the cases with units enough to show anything."""
    return [at for at, case in enumerate(cases) if case.tests[0].num_flipped >= rules.fewest_units(alpha)]


def equal_level(cases: Sequence[Case], rules: ComparisonRules, alpha: float) -> float:
    """Return the level of each case by Bonferroni's correction."""
    return alpha / max(len(able_cases(cases, rules, alpha)), 1)


def measure_sides(pairs: Sequence[PairedSides], rules: ComparisonRules, alpha: float = ALPHA) -> list[Difference]:
    """Return the difference of each pair of sides, with what is missing of either and what that decides."""
    tests = [
        [rules.test(outcomes) for outcomes in (pair.outcomes, pair.worst, pair.best) if outcomes] for pair in pairs
    ]
    deciding = [of_pair if rules.missing == "bounds" else of_pair[:1] for of_pair in tests]
    cases = [
        Case(pair.outcomes, of_pair, pair.treatment, pair.baseline)
        for pair, of_pair in zip(pairs, deciding, strict=True)
    ]
    measured, differences = measure_family(cases, rules, alpha, equal_levels=rules.not_worse is not None), []
    margin_alpha = equal_level(cases, rules, alpha)
    for pair, of_pair, case, difference in zip(pairs, tests, cases, measured, strict=True):
        level, decided_alike = difference.alpha, True
        if rules.not_worse and not difference.too_few:
            margin = -rules.not_worse / abs(rules.span.width)
            above, below = (
                all(bool(rejects(margin, level)[0]) for rejects in shows)
                for shows in ([test.above for test in case.tests], [test.below for test in case.tests])
            )
            difference = replace(difference, not_worse=True if above else False if below else None)
        if not difference.too_few:
            decisions = {
                decide_difference([test], rules.min_share, level, margin_alpha=margin_alpha, two_sided=True)
                for test in of_pair
            }
            decided_alike = decisions == {difference.decision}
        holds = decided_alike and (rules.bounded or not any(pair.missing))
        worst, best = [float(test.estimate_X[0]) * rules.span.width for test in of_pair[1:]] or (None, None)
        missing = MissingOutcomes((dict(pair.missing[0]), dict(pair.missing[1])), rules.missing, worst, best, holds)
        differences.append(replace(difference, missing=missing))
    return differences


def measure_parts(
    outcomes: PairedOutcomes, names: Sequence[str], rules: ComparisonRules, alpha: float = ALPHA
) -> tuple[list[Part], list[PairedTest]]:
    """Return the difference on each part of the tasks, and its test. names: the part of each task."""
    names_T, cases = np.asarray(names), []
    for name in sorted({*names}):
        part = choose_tasks(outcomes, np.flatnonzero(names_T == name))
        cases.append(Case(part, [rules.test(part)], name))
    parts = []
    for case, difference in zip(cases, measure_family(cases, rules, alpha), strict=True):
        sides_ST = case.outcomes.baseline_ST, case.outcomes.treatment_ST
        first, second = (rules.span.score(float(np.nanmean(np.nanmean(side_ST, 0)))) for side_ST in sides_ST)
        estimate, low, high = difference.estimate, difference.low, difference.high
        p_holm = None if difference.too_few else difference.p_holm
        parts.append(
            Part(case.treatment, difference.num_tasks, first, second, estimate, low, high, p_holm, difference.decision)
        )
    return parts, [case.tests[0] for case in cases]


def measure_categories(outcomes: PairedOutcomes, rules: ComparisonRules) -> tuple[Part, ...]:
    """Return the difference in each category of tasks; none where nearly every task has its own."""
    if 2 <= len({*outcomes.families}) <= min(MOST_CATEGORIES, len(outcomes.tasks) / 2):
        return tuple(measure_parts(outcomes, outcomes.families, rules)[0])
    return ()


def measure_benchmarks(
    outcomes: PairedOutcomes, benchmark_of: Mapping[str, str], rules: ComparisonRules, alpha: float
) -> tuple[Part, ...]:
    """Return the difference on each benchmark, and last of all with equal weights; none where there is one alone."""
    names = [benchmark_of.get(task) or "" for task in outcomes.tasks]
    if len({*names}) < 2:
        return ()
    parts, tests = measure_parts(outcomes, names, rules, alpha)
    mean, *limits = (rules.span.width * share for share in weigh_alike(tests, alpha))
    low, high = sorted(limits)
    decision = Decision.UNDECIDED
    if low > 0 or high < 0:
        decision = Decision.BETTER if mean * rules.span.width > 0 else Decision.WORSE
    first, second = (
        float(np.mean(means)) for means in zip(*((part.baseline, part.treatment) for part in parts), strict=True)
    )
    return *parts, Part("", len(names), first, second, mean, low, high, None, decision)


def weigh_alike(tests: Sequence[PairedTest], alpha: float = ALPHA) -> tuple[float, float, float]:
    """Return the mean of the differences that these tests are of, and its interval, as shares."""
    estimates = np.array([test.estimate_X[0] for test in tests])
    lows, highs = np.array([[limit[0] for limit in test.interval(alpha)] for test in tests]).T
    mean, num = estimates.mean(), len(tests)
    below, above = (float(np.linalg.norm(limits - estimates)) / num for limits in (lows, highs))
    return float(mean), float(mean - below), float(mean + above)


def benchmarks_of(logs: Sequence[ReadLog]) -> Mapping[str, str]:
    """Return the benchmark of each task by its id, as the first log of several has it; empty where none has several."""
    names = dict[str, str]()
    for log in logs:
        if log.id_columns[:-1] and log.id_columns[0] in BENCHMARKS:
            tasks = pc.unique(log.items["task"]).to_pylist()
            of_log = {task: ESCAPED.sub(r"\1", match[1]) for task in tasks if (match := BEFORE_ID.match(task))}
        elif len(pc.unique(log.items["env"]).drop_null()) > 1:
            rows = log.items.select(["task", "env"]).group_by(["task"], use_threads=False).aggregate([("env", "first")])
            of_log = dict(zip(rows["task"].to_pylist(), rows["env_first"].to_pylist(), strict=True))
        else:
            continue
        names = of_log | names if len({*of_log.values()} - {None}) > 1 else names
    return names


def explain(difference: Difference, tests: Sequence[PairedTest], rules: ComparisonRules) -> Difference:
    """Return a difference of shares in units of the score; where nothing is decided, with what would decide it.

    tests: all must agree on the decision.
    """
    needed, reasons = None, difference.reasons
    if difference.decision is Decision.UNDECIDED:
        reasons = (*reasons, Reason.of(ReasonKind.LOW_POWER if len(tests) == 1 else ReasonKind.RESTS_ON_MISSING))
    if difference.decision is Decision.UNDECIDED and len(tests) == 1 and rules.min_gain:
        needed = tests[0].size_for(rules.min_share, difference.alpha)
    width = rules.span.width
    limits = difference.low * width, difference.high * width
    return replace(
        difference,
        estimate=difference.estimate * width,
        low=min(limits),
        high=max(limits),
        quantity=Quantity.SHARE if rules.binary else Quantity.SCORE,
        needed=needed,
        reasons=reasons,
    )


def keep_if_alike(difference: Difference, rows: Sequence[Part], rules: ComparisonRules) -> Difference:
    """Return a difference undecided where the mean over benchmarks with equal weights does not show the same."""
    if not rows:
        return difference
    low, high = sorted(limit / rules.span.width for limit in (rows[-1].low, rows[-1].high))
    margin = (rules.not_worse or 0.0) / abs(rules.span.width)
    if difference.not_worse is not None and not (low > -margin if difference.not_worse else high < -margin):
        difference = replace(difference, not_worse=None)
    decided = {
        Decision.BETTER: low > 0,
        Decision.BETTER_BY_LESS: low > 0,
        Decision.WORSE: high < 0,
        Decision.NO_GAIN: high < rules.min_share,
        Decision.NO_DIFFERENCE: -rules.min_share < low and high < rules.min_share,
    }
    if decided.get(difference.decision, True):
        return difference
    reasons = (*difference.reasons, Reason.of(ReasonKind.RESTS_ON_WEIGHTS, num=len(rows) - 1))
    return replace(difference, decision=Decision.UNDECIDED, reasons=reasons)


def holm_level(p_values: Sequence[float], index: int, alpha: float = ALPHA) -> float:
    """Return the level of one of several tests by Holm's procedure, which stops at the first that rejects nothing."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    level = alpha
    for rank, number in enumerate(order):
        level = alpha / (len(order) - rank)
        if number == index or p_values[number] >= level:
            break
    return level


def joint_p_value(tests: Sequence[PairedTest]) -> float:
    """Return the p-value that there is no difference, or not the same one, in any of these cases."""
    same_sign = len({bool(test.estimate_X[0] > 0) for test in tests}) == 1
    return max(float(test.p()[0]) for test in tests) if same_sign else 1.0


def choose_tasks(outcomes: PairedOutcomes, numbers: Array) -> PairedOutcomes:
    """Return the outcomes of some tasks, by their numbers."""
    sides = outcomes.treatment_ST[:, numbers], outcomes.baseline_ST[:, numbers]
    tasks, families, units = (
        tuple(names[number] for number in numbers) for names in (outcomes.tasks, outcomes.families, outcomes.units)
    )
    return replace(outcomes, treatment_ST=sides[0], baseline_ST=sides[1], tasks=tasks, families=families, units=units)
