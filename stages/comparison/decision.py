"""Compare every side with the first on the same tasks, or with every other one, and decide what that shows.

A task counts once, with the mean of its samples. Sides with several training seeds are paired by seed. A decision has
the level that Holm's procedure gives it among all comparisons of the run, with a margin that of Bonferroni's, and its
interval is at the same level.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isclose
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison import direction
from composer_stages.comparison.clusters import Clusters, find_clusters
from composer_stages.comparison.config import Config
from composer_stages.comparison.costs import CostDifference, Frontier, compare_costs, find_frontier, spending
from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.measure import (
    Part,
    benchmarks_of,
    keep_if_alike,
    measure_benchmarks,
    measure_categories,
    measure_sides,
)
from composer_stages.comparison.pairs import (
    FEW_SAMPLES,
    ComparisonRules,
    ScoreSpan,
    SideTable,
    add_absent_tasks,
    average_samples,
    count_as_failed,
    leave_out,
    never_run,
    note_repeated_tasks,
    pair_sides,
    require_alike_units,
)
from composer_stages.comparison.ranks import Ranking, rank
from composer_stages.comparison.reconciliation import Reconciled, reconcile, require, weigh
from composer_stages.comparison.repeats import OF_A_RUN, Noise, are_repeats, measure_noise
from composer_stages.comparison.sides import TaskMatch, choose_score, match, sampling, told_apart
from composer_stages.comparison.tables import TOTAL
from composer_stages.comparison.words import describe_reasons
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation.difference import Difference
from composer_stages.evaluation.inference import ALPHA, MIN_GAIN, PairedTest, rate_interval
from composer_stages.evaluation.outcomes import PASSED, PairedOutcomes, average_cells
from composer_stages.formats.measurement import REWARD, ScoreKind
from composer_stages.terms import SWE_BENCH, TERMINAL_BENCH, benchmark_of

COUNTING_AS_FAILED = frozenset({SWE_BENCH, TERMINAL_BENCH})
"""The benchmarks whose own tables count what has no verdict as failed."""
PERCENT, FEW_PERCENT = 100, 5
"""The top of a scale in percent, and the score above which a side is on another scale than shares of 1."""
NEAR_TOTAL = 0.01
"""By how much a row of totals may be rounded."""
MARKS = (-1, -9, -99, -100, -999, -9999, 999, 9999)
"""Values by which programs and judges mark that there is no score."""


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
    num_rated: int
    """Tasks whose mean is given: those that both sides have, with missing ones that count as failed."""
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
    judges: tuple[str, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    """Means of a sample, of what the log records."""
    copy_of: str = ""
    """The letter of an earlier side with the same content."""


@dataclass(frozen=True)
class SettingDifference:
    """A setting by which two logs were made differently: its values in the first and in the other, empty for unknown.

    digests: the values are digests of texts.
    """

    name: str
    baseline: str
    treatment: str
    digests: bool = False

    @property
    def tells_apart(self) -> bool:
        """Return whether both logs record it, and it is none that repeats of one model may differ in."""
        return bool(self.baseline and self.treatment) and self.name not in OF_A_RUN


@dataclass(frozen=True)
class Pairing:
    """What stands beside the difference of two sides: how they were paired, and what their tasks and samples show.

    benchmarks: of several, and last of all with equal weights.
    """

    matched: TaskMatch
    settings: tuple[SettingDifference, ...]
    categories: tuple[Part, ...] = ()
    benchmarks: tuple[Part, ...] = ()
    noise: Noise | None = None
    clusters: Clusters | None = None
    costs: tuple[CostDifference, ...] = ()


@dataclass(frozen=True)
class LogComparison:
    """Everything that a comparison found.

    differences, pairings: of every side but the first from it, then of all other pairs where these are asked for, by
    which the ranking is. Numbers are in units of the score, and wins are tasks on which the side is better. scale: the
    lowest and the highest score that there can be, None where that is not known; span: that, or of those that occur.
    unit: what tasks are resampled in, empty for tasks alone. direction_was_set: the user gave whether lower scores are
    better. metrics: those that the logs name.
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
    ranking: Ranking | None = None
    frontier: Frontier | None = None

    @property
    def judged(self) -> bool:
        """Return whether what is paired as training seeds are judges."""
        return any(len(side.judges) > 1 for side in self.sides)


def compare(sides: Sequence[ReadLog], config: Config, alpha: float = ALPHA) -> tuple[LogComparison, pa.Table]:
    """Compare every side with the first; returns the result, and the scores of all tasks as a table.

    alpha: the level of all decisions together. The last side is the log that `noise` names, where it does.
    """
    chosen = choose_score(sides, config.score)
    reconciled = [reconcile(log) for log in chosen]
    for log, numbers in zip(chosen, reconciled, strict=True):
        require(log.name, numbers, config.unreconciled)
    base, *counterparts = told_apart([weigh(log) for log in chosen])
    matches = [match(base, log) for log in counterparts]
    matched, ways = [base, *(log for log, _ in matches)], [TaskMatch(), *(way for _, way in matches)]
    of_noise = matched[-1] if config.noise else None
    if of_noise and base.digests == of_noise.digests:
        raise UsageError("comparison.noise-is-itself", path=config.noise)
    if of_noise and (apart := [each for each in compare_settings(base, of_noise) if each.tells_apart]):
        raise UsageError("comparison.noise-of-another", path=config.noise, apart=apart)
    refuse_totals(matched)
    if not config.scale:
        refuse_other_scales(matched)
        refuse_marks(matched)
    if of_noise and len(config.paths) > 1:
        matched.pop()
    judged = {frozenset(pc.unique(log.items["seed"]).to_pylist()): log for log in matched if len(log.judges) > 1}
    if len(judged) > 1:
        raise BadInput("comparison.other-judges", logs=[(log.name, log.judges) for log in judged.values()])
    scores = pa.chunked_array([part for log in matched for part in log.items["score"].drop_null().chunks], pa.float64())
    if not len(scores):
        reasons = Counter(reason for log in matched for reason in log.items["reason"].to_pylist())
        raise BadInput("comparison.no-scores", reasons=describe_reasons(reasons))
    low, high = (float(value) for value in (pc.min(scores).as_py(), pc.max(scores).as_py()))
    scale = find_scale(matched, (low, high), config)
    lower = direction.lower_is_better(matched, config.lower_is_better)
    ends = scale or (low, high)
    span = ScoreSpan(*(ends[::-1] if lower else ends))
    unit = sampling(matched, config.unit)
    if config.unit:
        require_alike_units(matched)
    min_gain = config.min_gain or (MIN_GAIN * abs(span.width) if scale else None)
    if scale and (largest := max(config.min_gain or 0, config.not_worse or 0)) >= abs(span.width):
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
    few = FEW_SAMPLES.format(config.of_samples[1])
    lost = [
        Counter(log.items["reason"].filter(pc.is_null(log.items["score"])).to_pylist())
        + Counter({few: pc.sum(pc.equal(table["error_type"], few)).as_py() or 0})
        for log, table in zip(matched, tables, strict=True)
    ]
    letters = [name_side(index) for index in range(len(matched))]
    named = [
        SideTable(letter, log.name, table, reasons)
        for letter, log, table, reasons in zip(letters, matched, tables, lost, strict=True)
    ]
    numbers_of_pairs = [*combinations(range(len(matched)), 2)][: None if config.all_pairs else len(matched) - 1]
    pairs = [pair_sides(named[first], named[second], rules) for first, second in numbers_of_pairs]
    differences, benchmark_of = measure_sides(pairs, rules, alpha), benchmarks_of(matched)
    is_mean, pairings = config.outcome == "mean", list[Pairing]()
    for at, ((first, second), pair) in enumerate(zip(numbers_of_pairs, pairs, strict=True)):
        both, outcomes, level = (matched[first], matched[second]), pair.outcomes, differences[at].alpha
        benchmarks = measure_benchmarks(outcomes, benchmark_of, rules, level)
        differences[at] = keep_if_alike(differences[at], benchmarks, rules)
        for assumed in (pair.worst, pair.best) if rules.missing == "bounds" else ():
            rows = measure_benchmarks(assumed, benchmark_of, rules, level) if assumed else ()
            differences[at] = keep_if_alike(differences[at], rows, rules)
        runs = [
            [log for log in matched if are_repeats(side, log)] + ([of_noise] if of_noise and side is base else [])
            for side in both
        ]
        both_letters = letters[first], letters[second]
        pairings.append(
            Pairing(
                ways[second] if first == 0 else TaskMatch(),
                tuple(compare_settings(*both)),
                measure_categories(outcomes, rules),
                benchmarks,
                measure_noise(both, runs, both_letters, outcomes.tasks) if is_mean else None,
                find_clusters(both[0], outcomes, rules, level),
                compare_costs(both, outcomes, rules, both_letters, binary and is_mean and not lower),
            )
        )
    if config.noise and not ((noise := pairings[0].noise) and "A" in noise.repeated):
        raise UsageError("comparison.no-noise", path=config.noise, outcome=config.outcome)
    paired_tasks = [pa.array(pair.outcomes.tasks, pa.string()) for pair in pairs[: len(matched) - 1]]
    compared = [pc.unique(pa.chunked_array(paired_tasks)), *paired_tasks]
    summaries = tuple(
        summarize_side(
            log,
            (count_as_failed(side.rows) if rules.missing == "failed" else side.rows).filter(
                pc.is_in(side.rows["task_id"], tasks)
            ),
            side.letter,
            rules,
            numbers,
            "" if log.copy_of is None else letters[log.copy_of],
        )
        for side, log, tasks, numbers in zip(named, matched, compared, reconciled, strict=False)
    )
    by_mean = sorted(summaries, key=lambda side: -side.mean / span.width)
    comparison = LogComparison(
        summaries,
        tuple(differences),
        tuple(pairings),
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
        rank([side.letter for side in by_mean], differences) if config.all_pairs and len(summaries) > 2 else None,
        find_frontier({side.letter: (side.costs, side.mean / span.width) for side in summaries}),
    )
    first_pairs = [pair.outcomes for pair in pairs[: len(matched) - 1]]
    return comparison, tabulate_tasks(first_pairs, span, letters[1:], tables)


def name_side(number: int) -> str:
    """Return the letter of a side, from A on."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number] if number < 26 else f"side {number + 1}"


def refuse_other_scales(sides: Sequence[ReadLog]) -> None:
    """Raise `BadInput` where the scores of one side or judge are shares and those of another are not."""
    for log in (log for log in sides if len(log.judges) > 1):
        of_judges = log.items.group_by("seed").aggregate([("score", "max"), ("score", "approximate_median")])
        most, usual = pc.min(of_judges["score_max"]).as_py(), pc.max(of_judges["score_approximate_median"]).as_py()
        if usual and 0 < most <= 1 < usual:
            raise BadInput("comparison.scales-of-judges", name=log.name, judges=log.judges, most=most, usual=usual)
    scores = {log.name: np.asarray(log.items["score"].drop_null()) for log in sides}
    tops = {name: float(values.max()) for name, values in scores.items() if len(values) and values.min() >= 0}
    shares = [name for name, top in tops.items() if 0 < top <= 1]
    has_fractions = any((scores[name] % 1 > 0).any() for name in shares)
    # Beside passed and failed, most samples show it, or all are 0 or 100; beside fractions any sample does.
    percents = [
        name
        for name, top in tops.items()
        if FEW_PERCENT < top <= PERCENT
        and (has_fractions or np.median(scores[name]) > FEW_PERCENT or np.isin(scores[name], (0, PERCENT)).all())
    ]
    if shares and percents:
        raise BadInput("comparison.scales-differ", first=shares[0], second=percents[0], top=tops[percents[0]])


def refuse_marks(sides: Sequence[ReadLog]) -> None:
    """Raise `BadInput` where one value lies apart from all others and is one by which programs mark that none is known.

    Rewards have such values of their own.
    """
    for log in sides:
        is_named = log.chosen != REWARD and all(kind.scale is None for kind in log.kinds(log.chosen))
        values = np.asarray(log.items["score"].drop_null())
        for mark in MARKS if is_named else ():
            others = values[values != mark]
            if len(others) == len(values) or len(np.unique(others)) < 2:
                continue
            number, low, high = len(values) - len(others), float(others.min()), float(others.max())
            is_scale = high <= 1 or high == PERCENT or low >= 1  # as scores have, and numbers of other things do not
            if low >= 0 and (high <= mark / PERCENT if mark > 0 else is_scale):
                raise BadInput("comparison.mark", name=log.name, mark=mark, number=number, low=low, high=high)


def refuse_totals(sides: Sequence[ReadLog]) -> None:
    """Raise `BadInput` where a row of a table is named so, and is the mean or the sum of all others."""
    for log in (log for log in sides if log.id_columns):
        values = log.items["score"].to_numpy()
        distinct, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        for at in np.flatnonzero(pc.match_substring_regex(log.items["task"], TOTAL)):
            rest = counts - (distinct == values[at])
            if np.count_nonzero(rest) < 2:
                continue
            mean, total = np.average(distinct, weights=rest), distinct @ rest
            if any(isclose(values[at], number, rel_tol=NEAR_TOTAL) for number in (mean, PERCENT * mean, total)):
                name, score = log.items["task"][int(at)].as_py(), float(values[at])
                raise BadInput("comparison.total-row", path=log.label, id=name, score=score)


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
    """Return what missing tasks count as.

    In the tables of some programs they have failed. What a gate lets pass must not rest on tasks that were not played:
    a log that was cut off would pass.
    """
    if config.missing != "auto":
        return config.missing
    envs = {name and benchmark_of(name) for log in sides for name in pc.unique(log.items["env"]).to_pylist()}
    if envs <= COUNTING_AS_FAILED:
        return "failed"
    return "bounds" if config.policy or config.not_worse else "excluded"


def summarize_side(
    log: ReadLog, table: pa.Table, letter: str, rules: ComparisonRules, reconciled: tuple[Reconciled, ...], copy_of: str
) -> SideSummary:
    """Return what a side is, and its mean over the compared tasks, which are those of the table."""
    values_ST, unit_T, collection_S = average_cells(table, PASSED)
    tasks = pc.unique(table["task_id"])
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
    groups = log.items.group_by(["seed", "task"]).aggregate([("score", "count"), ([], "count_all")])
    least, most = (find(groups["score_count"]).as_py() for find in (pc.min, pc.max))
    return SideSummary(
        letter,
        log.name,
        log.label,
        log.programs,
        tuple(log.models),
        log.date,
        log.num_tasks,
        int((~np.isnan(values_ST)).any(0).sum()) if values_ST.size else 0,
        f"{least}" if least == most else f"{least} to {most}",
        len(values_ST),
        int(pc.count(log.items["score"]).as_py()),
        rules.span.score(mean),
        low,
        high,
        (*log.notes, *note_repeated_tasks(groups)),
        log.chosen,
        next(iter(sorted(log.kinds(log.chosen), key=str)), ScoreKind(log.chosen)),
        tuple(sorted(log.settings.get("task version", ()))),
        log.id_columns,
        reconciled,
        log.judges,
        {name: float(np.nanmean(spent_T)) for name, spent_T in spending(log, tasks).items()},
        copy_of,
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
