"""Compare every side with the first on the same tasks, and decide what that shows.

A task counts once, with the mean of its samples. Sides with several training seeds are paired by seed. A decision has
the level that Holm's procedure gives it among all comparisons of the run, and its interval is at the same level.

Scores are tested as shares of the way from the worst score to the best one (`ScoreSpan`), so that every test, bound and
assumption is about what is better; the record is in units of the score again, and B - A.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison import benchmarks, direction
from composer_stages.comparison.benchmarks import BenchmarkDifference
from composer_stages.comparison.config import Config
from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.reconciliation import Reconciled, reconcile, require, weigh
from composer_stages.comparison.sides import TaskMatch, choose_score, match, sampling, told_apart
from composer_stages.comparison.words import describe_reasons
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.difference import Decision, Difference, MissingOutcomes, Quantity, Reason, ReasonKind
from composer_stages.evaluation.inference import (
    ALPHA,
    MIN_GAIN,
    MIN_SCORE_UNITS,
    Array,
    PairedTest,
    decide_difference,
    fewest_units,
    holm,
    rate_interval,
)
from composer_stages.evaluation.measurement import measure_difference, paired_test
from composer_stages.evaluation.outcomes import NOT_SUBMITTED, PASSED, Missing, PairedOutcomes, average_cells, paired
from composer_stages.formats import terminal_bench
from composer_stages.formats.measurement import ScoreKind, State
from composer_stages.terms import SWE_BENCH, SamplingUnit

COUNTING_AS_FAILED = frozenset({SWE_BENCH, terminal_bench.NAME})
"""The environments whose own tables count what has no verdict as failed."""
MOST_FAMILIES = 60
PERCENT, FEW_PERCENT = 100, 5
"""The top of a scale in percent, and the median above which scores are no shares of 1."""


@dataclass(frozen=True)
class SideSummary:
    """One side: what its log is, and its mean with a 95 % interval."""

    letter: str
    name: str
    log: str
    programs: tuple[str, ...]
    models: tuple[str, ...]
    date: str
    num_tasks: int
    samples: str
    seeds: int
    num_scored: int
    mean: float
    low: float
    high: float
    notes: tuple[str, ...]
    score: str
    kind: ScoreKind
    task_versions: tuple[str, ...]
    id_columns: tuple[str, ...]
    reported: tuple[Reconciled, ...]


@dataclass(frozen=True)
class SettingDifference:
    """A setting by which two logs were made differently: its values in the first and in the other, empty for unknown.

    digests: the values are digests of texts.
    """

    name: str
    baseline: str
    treatment: str
    digests: bool = False


@dataclass(frozen=True)
class Pairing:
    """How a side was paired with the first: its tasks, its settings, and the means in each category of tasks."""

    matched: TaskMatch
    settings: tuple[SettingDifference, ...]
    families: tuple[Mapping[str, Any], ...]
    benchmarks: tuple[BenchmarkDifference, ...] = ()
    """The difference on each of several benchmarks, and last that of all with equal weights."""
    noise: float | None = None
    """How large a difference repeated runs alone make in 95 % of cases, in units of the score; None without repeats."""


@dataclass(frozen=True)
class LogComparison:
    """Everything that a comparison found.

    differences, pairings: of every side but the first, in their order; numbers are in units of the score, and wins are
    tasks on which the side is better. scale: the lowest and the highest score that there can be, None where that is not
    known; span: that, or of those that occur. unit: what tasks are resampled in, empty for tasks alone.
    direction_was_set: the user gave whether lower scores are better. metrics: those that the logs name.
    """

    sides: tuple[SideSummary, ...]
    differences: tuple[Difference, ...]
    pairings: tuple[Pairing, ...]
    binary: bool
    scale: tuple[float, float] | None
    span: tuple[float, float]
    min_gain: float | None
    not_worse: float | None
    unit: str
    fixed: bool
    lower_is_better: bool
    outcome: str
    direction_was_set: bool
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class ScoreSpan:
    """The scores from the worst, which is 0 where outcomes are tested, to the best, which is 1."""

    worst: float
    best: float

    @property
    def width(self) -> float:
        """Return the best score minus the worst one, negative where lower is better; 1 where all scores are equal."""
        return (self.best - self.worst) or 1.0

    def score(self, share: Any) -> Any:
        """Return the score of a share, or of an array of them."""
        return self.worst + share * self.width


@dataclass(frozen=True)
class PairedSides:
    """One side paired with the first: outcomes of both in 0..1, as they are assumed, and what is missing of either.

    worst, best: the outcomes if what is missing had ended worst and best for the side.
    """

    outcomes: PairedOutcomes
    missing: tuple[Counter[str], Counter[str]]
    worst: PairedOutcomes | None
    best: PairedOutcomes | None


@dataclass(frozen=True)
class ComparisonRules:
    """What all sides are compared by."""

    span: ScoreSpan
    unit: SamplingUnit | None
    binary: bool
    missing: Literal["excluded", "failed", "bounds"]
    min_gain: float | None
    """In units of the score; None where their scale is not known."""
    not_worse: float | None = None
    bounded: bool = True
    """Whether the span is the scale: else it is of the scores that occur, and says nothing of what is missing."""

    @property
    def fixed(self) -> bool:
        """Return whether sampling units are fixed."""
        return bool(self.unit and self.unit.fixed)

    @property
    def min_share(self) -> float:
        """Return the smallest difference of interest as a share of the span."""
        return (self.min_gain or 0.0) / abs(self.span.width)

    def fewest_units(self, alpha: float = ALPHA) -> int:
        """Return the units below which nothing is decided at this level."""
        return max(fewest_units(alpha), 0 if self.binary else MIN_SCORE_UNITS)

    def test(self, outcomes: PairedOutcomes) -> PairedTest:
        """Return the test of paired outcomes."""
        return paired_test(outcomes, fixed=self.fixed, scores=not self.binary)


def compare(sides: Sequence[ReadLog], config: Config) -> tuple[LogComparison, pa.Table]:
    """Compare every side with the first; returns the result, and the scores of all tasks as a table."""
    chosen = choose_score(sides, config.score)
    reconciled = [reconcile(log) for log in chosen]
    for log, numbers in zip(chosen, reconciled, strict=True):
        require(log.name, numbers, config.unreconciled)
    base, *counterparts = told_apart([weigh(log) for log in chosen])
    matches = [match(base, log) for log in counterparts]
    matched = [base, *(log for log, _ in matches)]
    scores = pa.chunked_array([part for log in matched for part in log.items["score"].drop_null().chunks], pa.float64())
    if not len(scores):
        reasons = Counter(reason for log in matched for reason in log.items["reason"].to_pylist())
        raise BadInput("comparison.no-scores", reasons=describe_reasons(reasons))
    if not config.scale:
        refuse_other_scales(matched)
    low, high = (float(value) for value in (pc.min(scores).as_py(), pc.max(scores).as_py()))
    scale = find_scale(matched, (low, high), config)
    lower = direction.lower_is_better(matched, config.lower_is_better)
    ends = scale or (low, high)
    span = ScoreSpan(*(ends[::-1] if lower else ends))
    unit = sampling(matched, config.unit)
    min_gain = config.min_gain or (MIN_GAIN * abs(span.width) if scale else None)
    if scale and (largest := max(config.min_gain or 0, config.not_worse or 0)) > abs(span.width):
        raise UsageError("comparison.min-gain-too-large", min_gain=largest, low=scale[0], high=scale[1])
    binary = bool(pc.all(pc.or_(pc.equal(scores, 0.0), pc.equal(scores, 1.0))).as_py())
    rules = ComparisonRules(
        span, unit, binary, choose_missing(config, matched), min_gain, config.not_worse, bool(scale)
    )
    if config.outcome != "mean" and not (binary and scale == (0.0, 1.0) and not lower):
        raise UsageError("comparison.outcome-of-scores", outcome=config.outcome, low=low, high=high)
    tables = [average_samples(log, span, unit, *config.of_samples) for log in matched]
    if not any(pc.count(table["passed"]).as_py() for table in tables):
        raise BadInput("comparison.too-few-samples", outcome=config.outcome)
    if rules.missing == "failed" and config.missing == "auto":  # a rule about what was tried and did not succeed
        unrun = [log.items["task"].filter(never_run(log)) for log in matched]
        for_none = pc.unique(pa.chunked_array([part for tasks in unrun for part in tasks.chunks], pa.string()))
        tables = [table.filter(pc.invert(pc.is_in(table["task_id"], for_none))) for table in tables]
        matched = [leave_out(log) for log in matched]
    if rules.missing == "failed":  # what any side submitted is what all are measured on
        submitted = pa.concat_tables(tables)
        tables = [add_absent_tasks(table, submitted) for table in tables]
    lost = [Counter(log.items["reason"].filter(pc.is_null(log.items["score"])).to_pylist()) for log in matched]
    pairs = [
        pair_sides((tables[0], table), (lost[0], missing), (base.name, log.name), rules)
        for table, missing, log in zip(tables[1:], lost[1:], counterparts, strict=True)
    ]
    letters = [name_side(index) for index in range(len(matched))]
    differences = measure_sides(pairs, letters[1:], rules)
    benchmark_of = benchmarks.benchmarks_of(base)
    pairings = tuple(
        Pairing(
            task_match,
            tuple(compare_settings(base, log)),
            tuple(compare_categories(pair.outcomes, rules)),
            tuple(compare_benchmarks(pair.outcomes, benchmark_of, rules, difference.alpha)),
            noise_of_repeats((base, log), pair.outcomes.tasks) if config.outcome == "mean" else None,
        )
        for pair, (_, task_match), log, difference in zip(pairs, matches, counterparts, differences, strict=True)
    )
    differences = [
        keep_if_alike(difference, pairing.benchmarks) for difference, pairing in zip(differences, pairings, strict=True)
    ]
    paired_tasks = [pa.array(pair.outcomes.tasks, pa.string()) for pair in pairs]
    compared = [pc.unique(pa.chunked_array(paired_tasks)), *paired_tasks]
    summaries = tuple(
        summarize_side(
            log,
            (count_as_failed(table) if rules.missing == "failed" else table).filter(pc.is_in(table["task_id"], tasks)),
            letter,
            rules,
            numbers,
        )
        for letter, log, table, tasks, numbers in zip(letters, matched, tables, compared, reconciled, strict=True)
    )
    comparison = LogComparison(
        summaries,
        tuple(differences),
        pairings,
        binary,
        scale,
        ends,
        min_gain,
        config.not_worse,
        unit.noun if unit else "",
        rules.fixed,
        lower,
        config.outcome,
        config.lower_is_better is not None,
        tuple(sorted({kind.metric or kind.name for log in matched for kind in log.kinds(log.chosen)})),
    )
    return comparison, tabulate_tasks([pair.outcomes for pair in pairs], span, letters[1:], tables)


def measure_sides(pairs: Sequence[PairedSides], letters: Sequence[str], rules: ComparisonRules) -> list[Difference]:
    """Return the difference of each side from the first, at the level that Holm's procedure gives it."""
    tests = [
        [rules.test(outcomes) for outcomes in (pair.outcomes, pair.worst, pair.best) if outcomes] for pair in pairs
    ]
    deciding = [side if rules.missing == "bounds" else side[:1] for side in tests]
    p_values = [joint_p_value(side) for side in deciding]
    adjusted = holm(p_values)
    differences = []
    for index, (pair, letter) in enumerate(zip(pairs, letters, strict=True)):
        alpha = holm_level(p_values, index)
        difference = measure_difference(
            pair.outcomes,
            deciding[index],
            min_gain=rules.min_share,
            alpha=alpha,
            p_value=p_values[index],
            fewest=rules.fewest_units(alpha),
            two_sided=True,
            fixed=rules.fixed,
            rate="score",
            treatment=letter,
            baseline="A",
            unit=rules.unit.noun if rules.unit else "task",
            p_holm=adjusted[index],
        )
        decided = (decide_difference([test], rules.min_share, alpha, two_sided=True) for test in tests[index])
        if rules.not_worse and not difference.too_few:
            worst_share = -rules.not_worse / abs(rules.span.width)
            above, below = (
                all(bool(shown(worst_share, alpha)[0]) for shown in shows)
                for shows in ([test.above for test in deciding[index]], [test.below for test in deciding[index]])
            )
            difference = replace(difference, not_worse=True if above else False if below else None)
        holds = difference.too_few or all(decision is difference.decision for decision in decided)
        holds = holds and (rules.bounded or not any(pair.missing))
        bounds = [float(test.estimate_X[0]) * rules.span.width for test in tests[index][1:]]
        worst, best = bounds or (None, None)
        missing = MissingOutcomes((dict(pair.missing[0]), dict(pair.missing[1])), rules.missing, worst, best, holds)
        differences.append(replace(explain(difference, deciding[index], rules), missing=missing))
    return differences


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


def keep_if_alike(difference: Difference, rows: Sequence[BenchmarkDifference]) -> Difference:
    """Return a difference undecided where the mean over benchmarks with equal weights does not show the same."""
    directions = {Decision.BETTER_BY_LESS: Decision.BETTER}
    decided = directions.get(difference.decision, difference.decision)
    if not rows or decided not in (Decision.BETTER, Decision.WORSE) or decided is rows[-1].decision:
        return difference
    reasons = (*difference.reasons, Reason.of(ReasonKind.RESTS_ON_WEIGHTS, num=len(rows) - 1))
    return replace(difference, decision=Decision.UNDECIDED, reasons=reasons)


def compare_benchmarks(
    outcomes: PairedOutcomes, benchmark_of: Mapping[str, str], rules: ComparisonRules, alpha: float
) -> list[BenchmarkDifference]:
    """Return the difference on each benchmark, and last of all with equal weights; none where there is one alone."""
    if not benchmark_of:
        return []
    names = np.array([benchmark_of.get(task, "") for task in outcomes.tasks])
    distinct = sorted({*names.tolist()})
    if len(distinct) < 2:
        return []
    tests = []
    for name in distinct:
        part = choose_tasks(outcomes, np.flatnonzero(names == name))
        test = rules.test(part)
        first, second = (float(np.nanmean(np.nanmean(side_ST, 0))) for side_ST in (part.baseline_ST, part.treatment_ST))
        decides = test.num_flipped >= rules.fewest_units(alpha)
        tests.append(benchmarks.BenchmarkTest(name, len(part.tasks), first, second, test, decides))
    return benchmarks.measure(tests, rules.span.width, rules.span.worst, alpha)


def noise_of_repeats(sides: Sequence[ReadLog], tasks: Sequence[str]) -> float | None:
    """Return the difference of two sides with equal rates that 95 % of repeated runs stay below, from their repeats.

    Samples of a task vary; the mean over n of them has an nth of that variance. None where most tasks of a side have no
    second sample: a single run does not show what another one would give.
    """
    variance = 0.0
    for log in sides:
        items = log.items.filter(pc.is_in(log.items["task"], pa.array(tasks, pa.string())))
        wanted = [("score", "variance", pc.VarianceOptions(ddof=1)), ("score", "count")]
        cells = items.group_by(["task"], use_threads=False).aggregate(wanted)
        repeated = cells.filter(pc.greater(cells["score_count"], 1))
        if len(repeated) * 2 <= len(tasks):
            return None
        of_means = pc.divide(repeated["score_variance"], pc.cast(repeated["score_count"], pa.float64()))
        variance += float(pc.mean(of_means).as_py()) / len(tasks)
    return float(NormalDist().inv_cdf(1 - ALPHA / 2)) * variance**0.5


def name_side(number: int) -> str:
    """Return the letter of a side, from A on."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number] if number < 26 else f"side {number + 1}"


def refuse_other_scales(sides: Sequence[ReadLog]) -> None:
    """Raise `BadInput` where the scores of one side are shares and those of another percentages."""
    scores = {log.name: np.asarray(log.items["score"].drop_null()) for log in sides}
    tops = {name: float(values.max()) for name, values in scores.items() if len(values) and values.min() >= 0}
    shares = [name for name, top in tops.items() if 0 < top <= 1]
    percents = [name for name, top in tops.items() if 1 < top <= PERCENT and np.median(scores[name]) > FEW_PERCENT]
    if shares and percents:
        raise BadInput("comparison.scales-differ", first=shares[0], second=percents[0], top=tops[percents[0]])


def find_scale(sides: Sequence[ReadLog], occurring: tuple[float, float], config: Config) -> tuple[float, float] | None:
    """Return the lowest and the highest score that there can be: the user's, the declared ones, 0 and 1, or None.

    occurring: the lowest and the highest score that there is, which are no scale.
    """
    if config.limits:
        if occurring[0] < config.limits[0] or occurring[1] > config.limits[1]:
            lowest, highest = occurring
            raise BadInput("comparison.score-outside-scale", scale=config.scale, lowest=lowest, highest=highest)
        return config.limits
    declared = {kind.scale for log in sides for kind in log.kinds(log.chosen)}
    for scale in (*(declared if len(declared) == 1 else ()), (0.0, 1.0)):
        if scale and scale[0] <= occurring[0] and occurring[1] <= scale[1]:
            return scale
    return None


def choose_missing(config: Config, sides: Sequence[ReadLog]) -> Literal["excluded", "failed", "bounds"]:
    """Return what missing tasks count as; in the tables of some programs they have failed."""
    if config.missing != "auto":
        return config.missing
    envs = {name for log in sides for name in pc.unique(log.items["env"]).to_pylist()}
    return "failed" if envs <= COUNTING_AS_FAILED else "excluded"


def holm_level(p_values: Sequence[float], index: int) -> float:
    """Return the level of one of several tests by Holm's procedure, which stops at the first that rejects nothing."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    level = ALPHA
    for rank, number in enumerate(order):
        level = ALPHA / (len(order) - rank)
        if number == index or p_values[number] >= level:
            break
    return level


def chance_of_k(passed: Array, num: Array, kind: str, k: int) -> Array:
    """Return the chance that any (`pass@`) or all (`pass^`) of k samples pass, of `num` samples of which some passed.

    The share of choices of k among the samples: Chen et al., arXiv 2107.03374, equation 1; Yao et al., arXiv
    2406.12045, section 3. NaN with fewer than k samples.
    """
    at = np.arange(k)[:, None]
    of_all = np.where(num >= k, num, np.nan) - at
    chosen = (passed if kind == "pass^" else num - passed) - at
    all_alike = (np.clip(chosen, 0, None) / of_all).prod(0)
    return all_alike if kind == "pass^" else 1 - all_alike


def average_samples(
    log: ReadLog, span: ScoreSpan, unit: SamplingUnit | None, outcome: str = "mean", k: int = 1
) -> pa.Table:
    """Return one row a task and training seed, as `outcomes.paired` reads them: the mean of its samples in 0..1.

    outcome, k: "mean", or the chance that any or all of k samples pass. lowest, highest: with the samples that have no
    score at 0, the worst, and at 1, the best.
    """
    scaled = pc.divide(pc.subtract(log.items["score"], span.worst), span.width)
    items = log.items.set_column(log.items.schema.get_field_index("score"), "score", scaled)
    groups = items.group_by(["seed", "task"], use_threads=False).aggregate(
        [
            *(("score", function) for function in ("mean", "sum", "count")),
            *((name, "first") for name in ("reason", "family", "unit", "place", "pair_set")),
            ([], "count_all"),
        ]
    )
    num = pc.cast(groups["count_all"], pa.float64())
    total, scored = pc.fill_null(groups["score_sum"], 0.0), pc.cast(groups["score_count"], pa.float64())
    lacking = pc.subtract(num, scored)
    if outcome == "mean":
        mean, reason = groups["score_mean"], groups["reason_first"]
        lowest = pc.divide(total, num)
        highest = pc.add(lowest, pc.divide(lacking, num))
    else:
        mean, lowest, highest = (
            pa.array(chance_of_k(passed.to_numpy(), of_num.to_numpy(), outcome, k), from_pandas=True)
            for passed, of_num in ((total, scored), (total, num), (pc.add(total, lacking), num))
        )
        reason = pc.coalesce(groups["reason_first"], pa.scalar(f"fewer than {k} samples"))
    task = groups["task"]
    units = task
    if unit is not None:
        units = groups["unit_first"]
        if units.null_count == len(units):
            coded = pc.fill_null(groups["family_first"], "").combine_chunks().dictionary_encode()
            named = pa.array([unit.of_family(name) for name in coded.dictionary.to_pylist()], pa.string())
            units = pc.if_else(pc.is_valid(groups["family_first"]), named.take(coded.indices), None)
        units = pc.coalesce(units, task)
    return pa.table(
        {
            "train_seed": groups["seed"],
            "pair_set": groups["pair_set_first"],
            "task_id": task,
            "family": groups["family_first"],
            "unit": units,
            "sample_idx": pa.array(np.zeros(len(task), dtype=np.int64)),
            "passed": mean,
            "lowest": lowest,
            "highest": highest,
            "error_type": pc.if_else(pc.is_valid(mean), None, reason),
            "place": groups["place_first"],
        }
    )


def never_run(log: ReadLog) -> pa.ChunkedArray:
    """Return which samples were never run, or have a verdict that is worth nothing."""
    states = pa.array([State.NOT_RUN.value, State.INVALID.value])
    return pc.fill_null(pc.is_in(log.items["state"], states), False)


def leave_out(log: ReadLog) -> ReadLog:
    """Return a log whose reasons say that what was never run is left out."""
    reasons = log.items["reason"]
    said = pc.if_else(never_run(log), pc.binary_join_element_wise(reasons, "left out", ", "), reasons)
    return replace(log, items=log.items.set_column(log.items.schema.get_field_index("reason"), "reason", said))


def pair_sides(
    tables: tuple[pa.Table, pa.Table], lost: Sequence[Counter[str]], names: tuple[str, str], rules: ComparisonRules
) -> PairedSides:
    """Pair two sides by task; a task that one of them lacks becomes an item without an outcome.

    lost: the samples of each side that have no score, by reason.
    """
    sides = [add_absent_tasks(*tables), add_absent_tasks(*tables[::-1])]
    absent = [pc.sum(pc.equal(side["error_type"], NOT_SUBMITTED)).as_py() or 0 for side in sides]
    missing = lost[0] + Counter({NOT_SUBMITTED: absent[0]}), lost[1] + Counter({NOT_SUBMITTED: absent[1]})

    def assuming(missing: Missing, *columns: str) -> PairedOutcomes | None:
        """Return the outcomes with these columns of either side as its means."""
        items = [
            side.set_column(side.column_names.index("passed"), "passed", side[column]).append_column(
                "arm", pa.array([arm] * len(side), pa.string())
            )
            for side, column, arm in zip(sides, columns, "AB", strict=True)
        ]
        return paired(pa.concat_tables(items), "B", "A", PASSED, missing)

    # Where not submitting is failing, there is nothing else to assume.
    failed = rules.missing == "failed"
    if any(missing) and rules.missing != "excluded" and not rules.bounded:
        lowest, highest = sorted((rules.span.worst, rules.span.best))
        raise BadInput("comparison.scale-unknown", missing=rules.missing, lowest=lowest, highest=highest)
    outcomes = assuming("failed", "lowest", "lowest") if failed else assuming("excluded", "passed", "passed")
    if outcomes is None:
        reasons = [f"{name}: {describe_reasons(side)}" for name, side in zip(names, missing, strict=True) if side]
        raise BadInput("comparison.no-common-task", first=names[0], second=names[1], reasons="; ".join(reasons))
    if failed or not any(missing) or not rules.bounded:
        return PairedSides(outcomes, missing, None, None)
    worst, best = assuming("against", "highest", "lowest"), assuming("for", "lowest", "highest")
    return PairedSides(outcomes, missing, worst, best)


def add_absent_tasks(side: pa.Table, reference: pa.Table) -> pa.Table:
    """Return a side with a row for each task of another side that it lacks."""
    lacking = reference.filter(pc.invert(pc.is_in(reference["task_id"], pc.unique(side["task_id"]))))
    if not len(lacking):
        return side
    lacking = lacking.group_by(["task_id"], use_threads=False).aggregate([("family", "first"), ("unit", "first")])
    rows = []
    for seed in pc.unique(side["train_seed"]).to_pylist():
        columns = {name: pa.nulls(len(lacking), side.schema.field(name).type) for name in side.column_names}
        columns |= {"task_id": lacking["task_id"], "family": lacking["family_first"], "unit": lacking["unit_first"]}
        columns |= {
            name: pa.array([value] * len(lacking), side.schema.field(name).type)
            for name, value in (("train_seed", seed), ("sample_idx", 0), ("error_type", NOT_SUBMITTED))
        }
        rows.append(pa.table(columns).select(side.column_names))
    return pa.concat_tables([side, *rows])


def count_as_failed(side: pa.Table) -> pa.Table:
    """Return a side whose samples and tasks without a score have the worst one."""
    scored = side.set_column(side.column_names.index("passed"), "passed", pc.fill_null(side["lowest"], 0.0))
    return scored.set_column(side.column_names.index("error_type"), "error_type", pa.nulls(len(side), pa.string()))


def joint_p_value(tests: Sequence[PairedTest]) -> float:
    """Return the p-value that there is no difference, or not the same one, in any of these cases."""
    same_sign = len({bool(test.estimate_X[0] > 0) for test in tests}) == 1
    return max(float(test.p()[0]) for test in tests) if same_sign else 1.0


def summarize_side(
    log: ReadLog, table: pa.Table, letter: str, rules: ComparisonRules, reconciled: tuple[Reconciled, ...]
) -> SideSummary:
    """Return what a side is, and its mean over the compared tasks, which are those of the table."""
    values_ST, unit_T, collection_S = average_cells(table, PASSED)
    mean = low = high = float("nan")
    if values_ST.size:
        mean = float(np.nanmean(np.nanmean(values_ST, 0)))
        if rules.binary:
            low, high = rate_interval(values_ST, unit_T, fixed=rules.fixed, collection_S=collection_S)
        else:
            none_XST = np.zeros_like(values_ST)[None]
            test = PairedTest(
                values_ST[None], none_XST, unit_T, fixed=rules.fixed, collection_S=collection_S, scores=True
            )
            low, high = (float(limit[0]) for limit in test.interval())
    low, high = sorted(rules.span.score(limit) for limit in (low, high))
    counts = log.items.group_by(["seed", "task"]).aggregate([("score", "count")])["score_count"]
    least, most = pc.min(counts).as_py(), pc.max(counts).as_py()
    return SideSummary(
        letter,
        log.name,
        log.label,
        log.programs,
        tuple(log.models),
        log.date,
        log.num_tasks,
        f"{least}" if least == most else f"{least} to {most}",
        len(values_ST),
        int(pc.count(log.items["score"]).as_py()),
        rules.span.score(mean),
        low,
        high,
        log.notes,
        log.chosen,
        next(iter(sorted(log.kinds(log.chosen), key=str)), ScoreKind(log.chosen)),
        tuple(sorted(log.settings.get("task version", ()))),
        log.id_columns,
        reconciled,
    )


def compare_settings(base: ReadLog, second_log: ReadLog) -> list[SettingDifference]:
    """Return the settings by which two logs were made differently."""
    differences = []
    if base.models != second_log.models and base.models and second_log.models:
        differences.append(SettingDifference("model", ", ".join(base.models), ", ".join(second_log.models)))
    for name in sorted({*base.settings, *second_log.settings}):
        first, second = (", ".join(sorted(log.settings.get(name, ()))) for log in (base, second_log))
        if first != second:
            digests = name == "system prompt" and bool(first and second)
            differences.append(SettingDifference(name, first, second, digests))
    return differences


def compare_categories(outcomes: PairedOutcomes, rules: ComparisonRules) -> list[dict[str, Any]]:
    """Return both means in each category of tasks, with p after Holm's correction where it has enough units."""
    names = np.asarray(outcomes.families)
    distinct = np.unique(names) if len(names) <= 100_000 or len(set(outcomes.families)) <= MOST_FAMILIES else names
    if not 2 <= len(distinct) <= min(MOST_FAMILIES, len(names) / 2):
        return []
    tests = {name: rules.test(choose_tasks(outcomes, np.flatnonzero(names == name))) for name in distinct.tolist()}
    tested = {name: float(test.p()[0]) for name, test in tests.items() if test.num_flipped >= rules.fewest_units()}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    sides = [rules.span.score(np.nanmean(side_ST, 0)) for side_ST in (outcomes.baseline_ST, outcomes.treatment_ST)]
    return [
        {
            "family": name,
            "tasks": int(at_T.sum()),
            "A": float(sides[0][at_T].mean()),
            "B": float(sides[1][at_T].mean()),
            "p_holm": adjusted.get(name),
        }
        for name in distinct.tolist()
        for at_T in [names == name]
    ]


def choose_tasks(outcomes: PairedOutcomes, numbers: Array) -> PairedOutcomes:
    """Return the outcomes of some tasks, by their numbers."""
    sides = outcomes.treatment_ST[:, numbers], outcomes.baseline_ST[:, numbers]
    tasks, families, units = (
        tuple(names[number] for number in numbers) for names in (outcomes.tasks, outcomes.families, outcomes.units)
    )
    return replace(outcomes, treatment_ST=sides[0], baseline_ST=sides[1], tasks=tasks, families=families, units=units)


def tabulate_tasks(
    pairs: Sequence[PairedOutcomes], span: ScoreSpan, letters: Sequence[str], tables: Sequence[pa.Table]
) -> pa.Table:
    """Return the compared tasks: side, task, family, the mean scores of A and of the side, and their first samples.

    tables: of A and each side, as `average_samples` makes them.
    """

    def addresses(table: pa.Table, tasks: pa.Array) -> pa.ChunkedArray:
        return table["place"].take(pc.index_in(tasks, table["task_id"]))

    parts = []
    for outcomes, letter, table in zip(pairs, letters, tables[1:], strict=True):
        tasks = pa.array(outcomes.tasks, pa.string())
        columns = {
            "side": pa.array([letter] * len(tasks), pa.string()),
            "task_id": tasks,
            "family": pa.array(outcomes.families, pa.string()),
            "baseline": span.score(np.nanmean(outcomes.baseline_ST, 0)),
            "score": span.score(np.nanmean(outcomes.treatment_ST, 0)),
            "baseline_place": addresses(tables[0], tasks),
            "place": addresses(table, tasks),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)
