"""One row a task and training seed, and two sides paired by task, with what either lacks.

Scores are tested as shares of the way from the worst score to the best one (`ScoreSpan`), so that every test, bound and
assumption is about what is better; records are in units of the score again, and B - A.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.words import describe_reasons
from composer_stages.errors import BadInput
from composer_stages.evaluation.inference import ALPHA, MIN_SCORE_UNITS, Array, PairedTest, fewest_units
from composer_stages.evaluation.measurement import paired_test
from composer_stages.evaluation.outcomes import NOT_SUBMITTED, PASSED, Missing, PairedOutcomes, paired
from composer_stages.formats.measurement import State
from composer_stages.runs.tables import with_column
from composer_stages.terms import SamplingUnit
from composer_stages.words import Sentence

FEW_SAMPLES = "with fewer than {} samples"
"""The reason of a task that has no `pass@K` or `pass^K`."""
FEW_REPEATED = 0.25
"""The share of tasks up to which more samples than most tasks have are worth a note."""


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
class SideTable:
    """One side: a row a task and training seed, as `average_samples` makes them, and why samples have no score."""

    letter: str
    name: str
    rows: pa.Table
    lost: Counter[str]


@dataclass(frozen=True)
class PairedSides:
    """Two sides paired by task: outcomes of both in 0..1, as they are assumed, and what is missing of either.

    worst, best: the outcomes if what is missing had ended worst and best for the side. treatment, baseline: letters.
    """

    treatment: str
    baseline: str
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
    items = with_column(log.items, "score", scaled)
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
        reason = pc.coalesce(groups["reason_first"], pa.scalar(FEW_SAMPLES.format(k)))
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


def require_alike_units(sides: Sequence[ReadLog]) -> None:
    """Raise `BadInput` where a side puts two tasks in one unit that another has in two, or one task in two.

    Units of another name are the same where they hold the same tasks.
    """
    placed = [log.items.filter(pc.is_valid(log.items["unit"])).select(["task", "unit"]) for log in sides]
    cells = [table.group_by(["task", "unit"], use_threads=False).aggregate([]).sort_by("task") for table in placed]

    def require(pairs: pa.Table, name: str, log: ReadLog) -> None:
        counts = pairs.group_by(name, use_threads=False).aggregate([([], "count_all")])
        several = counts[name].filter(pc.greater(counts["count_all"], 1))
        if len(several):
            found = pairs.filter(pc.equal(pairs[name], several[0])).to_pylist()[:2]
            raise BadInput("comparison.other-units", name=log.name, first=sides[0].name, found=found)

    for log, of_side in zip(sides, cells, strict=True):
        require(of_side, "task", log)
    for log, of_side in zip(sides[1:], cells[1:], strict=True):
        both = cells[0].join(of_side, "task", join_type="inner", right_suffix="_other").sort_by("task")
        pairs = both.group_by(["unit", "unit_other"], use_threads=False).aggregate([("task", "first")])
        require(pairs, "unit", log)
        require(pairs, "unit_other", log)


def never_run(log: ReadLog) -> pa.ChunkedArray:
    """Return which samples were never run, or have a verdict that is worth nothing."""
    states = pa.array([State.NOT_RUN.value, State.INVALID.value])
    return pc.fill_null(pc.is_in(log.items["state"], states), False)


def leave_out(log: ReadLog) -> ReadLog:
    """Return a log whose reasons say that what was never run is left out."""
    reasons = log.items["reason"]
    said = pc.if_else(never_run(log), pc.binary_join_element_wise(reasons, "left out", ", "), reasons)
    return replace(log, items=with_column(log.items, "reason", said))


def note_repeated_tasks(groups: pa.Table) -> list[Sentence]:
    """Return a note where few tasks have more samples than most have, as rows that were written twice do.

    groups: each task and training seed, with the number of its samples as `count_all`.
    """
    num_T = np.asarray(groups["count_all"])
    usual = int(np.median(num_T)) if len(num_T) else 0
    more = groups.filter(pa.array(num_T > usual))
    if not 0 < len(more) <= FEW_REPEATED * len(num_T):
        return []
    first = more.sort_by("task").slice(0, 1).to_pylist()[0]
    of_first = {"first": first["task"], "samples": first["count_all"]}
    return [Sentence("comparison.repeated-tasks", tasks=len(more), of=len(num_T), usual=usual, **of_first)]


def pair_sides(baseline: SideTable, treatment: SideTable, rules: ComparisonRules) -> PairedSides:
    """Pair two sides by task; a task that one of them lacks becomes an item without an outcome."""
    both = baseline, treatment
    sides = [add_absent_tasks(baseline.rows, treatment.rows), add_absent_tasks(treatment.rows, baseline.rows)]
    absent = [pc.sum(pc.equal(rows["error_type"], NOT_SUBMITTED)).as_py() or 0 for rows in sides]
    missing = baseline.lost + Counter({NOT_SUBMITTED: absent[0]}), treatment.lost + Counter({NOT_SUBMITTED: absent[1]})
    letters = treatment.letter, baseline.letter

    def assuming(missing: Missing, *columns: str) -> PairedOutcomes | None:
        """Return the outcomes with these columns of either side as its means."""
        items = [
            with_column(side, "passed", side[column]).append_column("arm", pa.array([arm] * len(side), pa.string()))
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
        reasons = [f"{side.name}: {describe_reasons(lost)}" for side, lost in zip(both, missing, strict=True) if lost]
        raise BadInput(
            "comparison.no-common-task", first=baseline.name, second=treatment.name, reasons="; ".join(reasons)
        )
    if failed or not any(missing) or not rules.bounded:
        return PairedSides(*letters, outcomes, missing, None, None)
    worst, best = assuming("against", "highest", "lowest"), assuming("for", "lowest", "highest")
    return PairedSides(*letters, outcomes, missing, worst, best)


def add_absent_tasks(side: pa.Table, reference: pa.Table) -> pa.Table:
    """Return a side with a row for each task of another side that it, or one of its seeds or judges, lacks."""
    seeds, others = (pc.unique(rows["train_seed"]).to_pylist() for rows in (side, reference))
    rows = [side]
    for seed in seeds:
        of_seed, lacking = side.filter(pc.equal(side["train_seed"], seed)), reference
        if len(seeds) > 1 and len(others) > 1:
            lacking = reference.filter(pc.equal(reference["train_seed"], seed))
        lacking = lacking.filter(pc.invert(pc.is_in(lacking["task_id"], pc.unique(of_seed["task_id"]))))
        lacking = lacking.group_by(["task_id"], use_threads=False).aggregate([("family", "first"), ("unit", "first")])
        columns = {name: pa.nulls(len(lacking), side.schema.field(name).type) for name in side.column_names}
        columns |= {"task_id": lacking["task_id"], "family": lacking["family_first"], "unit": lacking["unit_first"]}
        columns |= {
            name: pa.array([value] * len(lacking), side.schema.field(name).type)
            for name, value in (("train_seed", seed), ("sample_idx", 0), ("error_type", NOT_SUBMITTED))
        }
        rows.append(pa.table(columns).select(side.column_names))
    return pa.concat_tables(rows)


def count_as_failed(side: pa.Table) -> pa.Table:
    """Return a side whose samples and tasks without a score have the worst one."""
    scored = with_column(side, "passed", pc.fill_null(side["lowest"], 0.0))
    return with_column(scored, "error_type", pa.nulls(len(side), pa.string()))
