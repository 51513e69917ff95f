"""What `compare` does: every side against the first, on the same tasks, and what that shows.

A task counts once, with the mean of its samples. Sides with several training seeds are paired by seed. A decision has
the level that Holm's procedure gives it among all comparisons of the run, and its interval is at the same level.

Scores are tested as shares of the way from the worst score to the best one (`ScoreSpan`), so that every test, bound and
assumption is about what is better; whatever is shown is in units of the score again, and B - A.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.comparison import direction, logs, report
from stages.comparison.config import Config
from stages.comparison.logs import ReadLog
from stages.errors import BadInput, UsageError
from stages.evaluation.inference import (
    ALPHA,
    BETTER,
    MIN_GAIN,
    MIN_SCORE_UNITS,
    NO_GAIN,
    TIE,
    UNDECIDED,
    WORSE,
    Array,
    PairedTest,
    fewest_units,
    holm,
    numbered,
    rate_interval,
    shows,
)
from stages.evaluation.outcomes import NOT_SUBMITTED, PASSED, Missing, PairedOutcomes, cells_of, paired
from stages.formats import terminal_bench
from stages.layout import counted
from stages.runs import store
from stages.runs.run import Inputs, Run, RunWriter
from stages.runs.stage import Plan
from stages.terms import SWE_BENCH, SamplingUnit

NO_DIFFERENCE = "no difference"
EXIT_CODES = {BETTER: 0, WORSE: 1, NO_GAIN: 1, NO_DIFFERENCE: 1, UNDECIDED: 3}
TASKS = "tasks.parquet"
POWER = 0.8
"""Of the number of tasks that finds `min_gain`."""
COUNTING_AS_FAILED = frozenset({SWE_BENCH, terminal_bench.NAME})
"""The environments whose own tables count what has no verdict as failed."""
MOST_FAMILIES = 60


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


@dataclass(frozen=True)
class LogDifference:
    """One side minus the first, in units of the score, and what it shows.

    wins, losses: tasks on which this side is better and worse. missing: by side, how many samples have no score, and
    tasks no sample, by reason. worst, best: the difference if they had ended worst and best for this side. holds:
    whether the decision is the same in all of these cases. needed: tasks that find `min_gain` in 80 % of cases.
    """

    letter: str
    decision: str
    estimate: float
    low: float
    high: float
    p: float
    p_holm: float
    alpha: float
    num_tasks: int
    num_units: int
    wins: int
    losses: int
    missing: tuple[Mapping[str, int], Mapping[str, int]]
    counted_as: str
    worst: float | None
    best: float | None
    holds: bool
    needed: int | None
    too_few: str
    matched: str
    settings: tuple[str, ...]
    families: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class LogComparison:
    """Everything that a comparison found.

    scale: the lowest and the highest score. unit: what tasks are resampled in, empty for tasks alone.
    direction_was_set: the user said whether lower scores are better. metrics: those that the logs name.
    """

    sides: tuple[SideSummary, ...]
    differences: tuple[LogDifference, ...]
    binary: bool
    scale: tuple[float, float]
    min_gain: float
    unit: str
    fixed: bool
    lower_is_better: bool
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
    """One side paired with the first: outcomes of both in 0..1, as they are assumed, and what is missing of either."""

    outcomes: PairedOutcomes
    missing: tuple[Counter[str], Counter[str]]
    worst: PairedOutcomes | None
    best: PairedOutcomes | None


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of logs to read."""
    del inputs
    return Plan(units=len(config.paths), what="logs")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Read the logs, compare every side with the first, and write the result."""
    del inputs
    found = logs.sides(config.paths, config.unit)
    comparison, tables = compare(found, config)
    first = comparison.differences[0]
    out.set_summary(
        exit_code=EXIT_CODES[first.decision],
        verdict=first.decision,
        by=report.difference(comparison, first),
        why=report.sentence(comparison, first),
        lower_is_better=comparison.lower_is_better,
        differences=[
            {name: value for name, value in asdict(one).items() if name != "families"} for one in comparison.differences
        ],
    )
    out.count(planned=len(found), done=len(found))
    out.document("comparison", asdict(comparison))
    out.write_export(TASKS, partial(_write, tables))
    flips = report.flips(tables, len(tables), places=True) if config.flips else report.flips(tables, report.FLIPS)
    out.write_file("report.txt", f"{report.text(comparison)}{flips}\n")
    out.write_file("comparison.html", report.page(comparison, tables))


def _write(table: pa.Table, file: BinaryIO) -> int:
    pq.write_table(table, file)
    return len(table)


def finish(run: Run, config: Config) -> None:
    """Write the page where a file is named for it."""
    if config.html:
        store.write_sealed(Path(config.html), run.read_file("comparison.html") or b"")


def compare(found: Sequence[ReadLog], config: Config) -> tuple[LogComparison, pa.Table]:
    """Compare every side with the first; returns the result, and the scores of all tasks as a table."""
    base, *others = found
    matched = [logs.match(base, other) for other in others]
    every = [base, *(other for other, _ in matched)]
    known = pa.chunked_array([part for log in every for part in log.items["score"].drop_null().chunks], pa.float64())
    if not len(known):
        why = Counter(reason or "without a reason" for log in every for reason in log.items["reason"].to_pylist())
        raise BadInput(f"No sample of these logs has a score ({report.reasons(why)}). Give finished evaluations.")
    low, high = (float(value) for value in (pc.min(known).as_py(), pc.max(known).as_py()))
    binary = bool(pc.all(pc.or_(pc.equal(known, 0.0), pc.equal(known, 1.0))).as_py())
    scale = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    lower = direction.lower_is_better(every, config.lower_is_better)
    span = ScoreSpan(*(scale[::-1] if lower else scale))
    width = abs(span.width)
    unit = logs.sampling(every, config.unit)
    min_gain = config.min_gain or MIN_GAIN * width
    if scale == (0.0, 1.0) and min_gain > 1:
        raise UsageError(
            f"min_gain is {min_gain:g}, and no difference can be that large: the scores are between 0 and 1. It is in "
            "units of the score: 5 points of a pass rate are 0.05."
        )
    collapsed = [_by_task(log, span, unit) for log in every]
    way = _missing(config, every)
    if way == "failed":  # what any side submitted is what all are measured on
        asked = pa.concat_tables(collapsed)
        collapsed = [_with_absent(side, asked) for side in collapsed]
    lost = [Counter(log.items["reason"].filter(pc.is_null(log.items["score"])).to_pylist()) for log in every]
    pairs = [
        _paired((collapsed[0], side), (lost[0], of_side), (base.name, log.name), way)
        for side, of_side, log in zip(collapsed[1:], lost[1:], others, strict=True)
    ]
    test = partial(_test, unit=unit, scores=not binary)
    tests = [[test(one) for one in (pair.outcomes, pair.worst, pair.best) if one] for pair in pairs]
    all_deciding = [of if way == "bounds" else of[:1] for of in tests]
    p_values = [_p(of) for of in all_deciding]
    adjusted = holm(p_values)
    differences = []
    for index, (pair, of, deciding, (_, how)) in enumerate(zip(pairs, tests, all_deciding, matched, strict=True)):
        alpha = _level(p_values, index)
        limits = [one.interval(alpha) for one in deciding]
        (lowest,), (highest,) = np.min([one[0] for one in limits], 0), np.max([one[1] for one in limits], 0)
        limits_shown = float(lowest) * span.width, float(highest) * span.width
        outcomes, units = pair.outcomes, of[0].num_flipped
        d_T = np.nanmean(outcomes.treatment_ST - outcomes.baseline_ST, 0)
        least = max(fewest_units(alpha), 0 if binary else MIN_SCORE_UNITS)
        noun = unit.noun if unit and not unit.fixed else "task"
        too_few = f"{counted(units, noun)}, and {least} are needed to show anything" if units < least else ""
        decided = UNDECIDED if too_few else _decision(deciding, min_gain / width, alpha)
        # A difference of as many standard errors as level and power take together is found at that power.
        at_level, at_power = (NormalDist().inv_cdf(share) for share in (1 - alpha / 2, POWER))
        error = (highest - lowest) / 2 / at_level
        needed = ceil(len(d_T) * ((at_level + at_power) * error / (min_gain / width)) ** 2)
        differences.append(
            LogDifference(
                letter=_letter(index + 1),
                decision=decided,
                estimate=float(of[0].estimate_X[0]) * span.width,
                low=min(limits_shown),
                high=max(limits_shown),
                p=p_values[index],
                p_holm=adjusted[index],
                alpha=alpha,
                num_tasks=len(d_T),
                num_units=units if unit is None or not unit.fixed else len(set(outcomes.units)),
                wins=int((d_T > TIE).sum()),
                losses=int((d_T < -TIE).sum()),
                missing=(dict(pair.missing[0]), dict(pair.missing[1])),
                counted_as=way,
                worst=float(of[1].estimate_X[0]) * span.width if len(of) > 1 else None,
                best=float(of[2].estimate_X[0]) * span.width if len(of) > 1 else None,
                holds=too_few != "" or all(_decision([one], min_gain / width, alpha) == decided for one in of),
                needed=needed if decided == UNDECIDED and len(deciding) == 1 else None,
                too_few=too_few,
                matched=how,
                settings=tuple(_settings(base, others[index])),
                families=tuple(_families(outcomes, span, test, max(fewest_units(), 0 if binary else MIN_SCORE_UNITS))),
            )
        )
    of_pairs = [pa.array(pair.outcomes.tasks, pa.string()) for pair in pairs]
    compared = [pc.unique(pa.chunked_array(of_pairs)), *of_pairs]
    sides = tuple(
        _side(
            log,
            (_failed(table) if way == "failed" else table).filter(pc.is_in(table["task_id"], tasks)),
            _letter(index),
            unit,
            binary,
            span,
        )
        for index, (log, table, tasks) in enumerate(zip(every, collapsed, compared, strict=True))
    )
    tables = _tasks([pair.outcomes for pair in pairs], span, [one.letter for one in differences], collapsed)
    made = LogComparison(
        sides,
        tuple(differences),
        binary,
        scale,
        min_gain,
        unit.noun if unit else "",
        bool(unit and unit.fixed),
        lower,
        config.lower_is_better is not None,
        tuple(sorted({metric.name for log in every for metric in log.metrics})),
    )
    return made, tables


def _letter(number: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number] if number < 26 else f"side {number + 1}"


def _missing(config: Config, every: Sequence[ReadLog]) -> Literal["excluded", "failed", "bounds"]:
    """Return what missing tasks count as; in the tables of some programs they have failed."""
    if config.missing != "auto":
        return config.missing
    envs = {name for log in every for name in pc.unique(log.items["env"]).to_pylist()}
    return "failed" if envs <= COUNTING_AS_FAILED else "excluded"


def _level(p_values: Sequence[float], index: int) -> float:
    """Return the level of one of several tests by Holm's procedure, which stops at the first that rejects nothing."""
    order = sorted(range(len(p_values)), key=lambda one: p_values[one])
    level = ALPHA
    for rank, one in enumerate(order):
        level = ALPHA / (len(order) - rank)
        if one == index or p_values[one] >= level:
            break
    return level


def _by_task(log: ReadLog, span: ScoreSpan, unit: SamplingUnit | None) -> pa.Table:
    """Return one row a task and training seed, as `outcomes.paired` reads them: the mean of its samples in 0..1.

    lowest, highest: the mean with the samples that have no score at 0, the worst, and at 1, the best.
    """
    scaled = pc.divide(pc.subtract(log.items["score"], span.worst), span.width)
    items = log.items.set_column(log.items.schema.get_field_index("score"), "score", scaled)
    groups = items.group_by(["seed", "task"], use_threads=False).aggregate(
        [
            *(("score", of) for of in ("mean", "sum", "count")),
            *((name, "first") for name in ("reason", "family", "unit", "place", "pair_set")),
            ([], "count_all"),
        ]
    )
    num = pc.cast(groups["count_all"], pa.float64())
    lowest = pc.divide(pc.fill_null(groups["score_sum"], 0.0), num)
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
            "passed": groups["score_mean"],
            "lowest": lowest,
            "highest": pc.add(lowest, pc.divide(pc.subtract(num, groups["score_count"]), num)),
            "error_type": pc.if_else(pc.is_valid(groups["score_mean"]), None, groups["reason_first"]),
            "place": groups["place_first"],
        }
    )


def _paired(
    tables: tuple[pa.Table, pa.Table], lost: Sequence[Counter[str]], names: tuple[str, str], way: str
) -> PairedSides:
    """Pair two sides by task; a task that one of them lacks becomes an item without an outcome.

    lost: the samples of each side that have no score, by reason.
    """
    sides = [_with_absent(*tables), _with_absent(*tables[::-1])]
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
    found = assuming("failed", "lowest", "lowest") if way == "failed" else assuming("excluded", "passed", "passed")
    if found is None:
        reasons = "; ".join(f"{name}: {report.reasons(of)}" for name, of in zip(names, missing, strict=True) if of)
        raise BadInput(
            f"No task has a score in both {names[0]} and {names[1]} ({reasons}). Give logs that both scored some task, "
            "or count what is missing as failed (--missing failed)."
        )
    if way == "failed" or not any(missing):
        return PairedSides(found, missing, None, None)
    worst, best = assuming("against", "highest", "lowest"), assuming("for", "lowest", "highest")
    return PairedSides(found, missing, worst, best)


def _with_absent(own: pa.Table, other: pa.Table) -> pa.Table:
    """Return a side with a row for each task of the other one that it lacks."""
    lacking = other.filter(pc.invert(pc.is_in(other["task_id"], pc.unique(own["task_id"]))))
    if not len(lacking):
        return own
    lacking = lacking.group_by(["task_id"], use_threads=False).aggregate([("family", "first"), ("unit", "first")])
    rows = []
    for seed in pc.unique(own["train_seed"]).to_pylist():
        columns = {name: pa.nulls(len(lacking), own.schema.field(name).type) for name in own.column_names}
        columns |= {"task_id": lacking["task_id"], "family": lacking["family_first"], "unit": lacking["unit_first"]}
        columns |= {
            name: pa.array([value] * len(lacking), own.schema.field(name).type)
            for name, value in (("train_seed", seed), ("sample_idx", 0), ("error_type", NOT_SUBMITTED))
        }
        rows.append(pa.table(columns).select(own.column_names))
    return pa.concat_tables([own, *rows])


def _failed(side: pa.Table) -> pa.Table:
    """Return a side whose samples and tasks without a score have the worst one."""
    scored = side.set_column(side.column_names.index("passed"), "passed", pc.fill_null(side["lowest"], 0.0))
    return scored.set_column(side.column_names.index("error_type"), "error_type", pa.nulls(len(side), pa.string()))


def _test(outcomes: PairedOutcomes, unit: SamplingUnit | None, scores: bool) -> PairedTest:
    sides = outcomes.treatment_ST[None], outcomes.baseline_ST[None]
    collection_S = numbered(outcomes.collections) if any(outcomes.collections) else None
    fixed = bool(unit and unit.fixed)
    return PairedTest(*sides, _units(outcomes), fixed=fixed, collection_S=collection_S, scores=scores)


def _p(tests: Sequence[PairedTest]) -> float:
    """Return the p-value that there is no difference, or not the same one, in any of these cases."""
    same = len({bool(test.estimate_X[0] > 0) for test in tests}) == 1
    return max(float(test.p()[0]) for test in tests) if same else 1.0


def _units(outcomes: PairedOutcomes) -> Array:
    return np.arange(len(outcomes.tasks)) if outcomes.units == outcomes.tasks else numbered(outcomes.units)


def _decision(tests: Sequence[PairedTest], min_gain: float, alpha: float) -> str:
    """Return what is shown in all tests: also that there is no difference of interest in either direction."""
    shown = str(shows(tests, min_gain, alpha)[0])
    equal = shown == NO_GAIN and all(bool(test.above(-min_gain, alpha)[0]) for test in tests)
    return NO_DIFFERENCE if equal else shown


def _side(
    log: ReadLog, table: pa.Table, letter: str, unit: SamplingUnit | None, binary: bool, span: ScoreSpan
) -> SideSummary:
    """Return what a side is, and its mean over the compared tasks, which are those of the table."""
    values_ST, unit_T, collection_S = cells_of(table, PASSED)
    fixed = bool(unit and unit.fixed)
    mean = low = high = float("nan")
    if values_ST.size:
        mean = float(np.nanmean(np.nanmean(values_ST, 0)))
        if binary:
            low, high = rate_interval(values_ST, unit_T, fixed=fixed, collection_S=collection_S)
        else:
            none_XST = np.zeros_like(values_ST)[None]
            alone = PairedTest(values_ST[None], none_XST, unit_T, fixed=fixed, collection_S=collection_S, scores=True)
            low, high = (float(limit[0]) for limit in alone.interval())
    low, high = sorted(span.score(limit) for limit in (low, high))
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
        span.score(mean),
        low,
        high,
        log.notes,
    )


def _settings(base: ReadLog, other: ReadLog) -> list[str]:
    """Return in words how two logs were made differently."""
    found = []
    if base.models != other.models and base.models and other.models:
        found.append(f"model: {', '.join(base.models)} and {', '.join(other.models)}")
    for what in sorted({*base.facts, *other.facts}):
        ours, theirs = (", ".join(sorted(log.facts.get(what, ()))) or "not recorded" for log in (base, other))
        if ours != theirs:
            digests = what == "system prompt" and "not recorded" not in (ours, theirs)
            found.append("the system prompts differ" if digests else f"{what}: {ours} and {theirs}")
    return found


def _families(
    outcomes: PairedOutcomes, span: ScoreSpan, test: Callable[[PairedOutcomes], PairedTest], least: int
) -> list[dict[str, Any]]:
    """Return both means in each category of tasks, with p after Holm's correction where it has `least` units."""
    names = np.asarray(outcomes.families)
    distinct = np.unique(names) if len(names) <= 100_000 or len(set(outcomes.families)) <= MOST_FAMILIES else names
    if not 2 <= len(distinct) <= min(MOST_FAMILIES, len(names) / 2):
        return []
    tests = {name: test(_part(outcomes, np.flatnonzero(names == name))) for name in distinct.tolist()}
    tested = {name: float(one.p()[0]) for name, one in tests.items() if one.num_flipped >= least}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    sides = [span.score(np.nanmean(side_ST, 0)) for side_ST in (outcomes.baseline_ST, outcomes.treatment_ST)]
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


def _part(outcomes: PairedOutcomes, chosen: Array) -> PairedOutcomes:
    """Return the outcomes of some tasks, by their numbers."""
    sides = outcomes.treatment_ST[:, chosen], outcomes.baseline_ST[:, chosen]
    tasks, families, units = (
        tuple(of[task] for task in chosen) for of in (outcomes.tasks, outcomes.families, outcomes.units)
    )
    return replace(outcomes, treatment_ST=sides[0], baseline_ST=sides[1], tasks=tasks, families=families, units=units)


def _tasks(
    found: Sequence[PairedOutcomes], span: ScoreSpan, letters: Sequence[str], tables: Sequence[pa.Table]
) -> pa.Table:
    """Return the compared tasks: side, task, family, the mean scores of A and of the side, and their first samples.

    tables: of A and each side, as `_by_task` makes them.
    """

    def places(table: pa.Table, tasks: pa.Array) -> pa.ChunkedArray:
        return table["place"].take(pc.index_in(tasks, table["task_id"]))

    parts = []
    for one, letter, table in zip(found, letters, tables[1:], strict=True):
        tasks = pa.array(one.tasks, pa.string())
        columns = {
            "side": pa.array([letter] * len(tasks), pa.string()),
            "task_id": tasks,
            "family": pa.array(one.families, pa.string()),
            "baseline": span.score(np.nanmean(one.baseline_ST, 0)),
            "score": span.score(np.nanmean(one.treatment_ST, 0)),
            "baseline_place": places(tables[0], tasks),
            "place": places(table, tasks),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)
