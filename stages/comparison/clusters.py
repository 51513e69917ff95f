"""Find what tasks share, such as a document or a question, and say what resampling them together would change."""

from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.comparison.logs import ReadLog
from composer_stages.comparison.pairs import ComparisonRules
from composer_stages.evaluation.outcomes import PairedOutcomes
from composer_stages.terms import SamplingUnit


@dataclass(frozen=True)
class Clusters:
    """Tasks that share values of a column, and the interval of the difference if these are resampled together."""

    column: str
    num_units: int
    num_tasks: int
    low: float
    high: float


def find_clusters(log: ReadLog, outcomes: PairedOutcomes, rules: ComparisonRules, alpha: float) -> Clusters | None:
    """Return the column whose values tasks share and which widens the interval most; None where no value repeats."""
    if rules.unit:
        return None
    tasks, clusters = pa.array(outcomes.tasks, pa.string()), list[Clusters]()
    for name, column in log.groups.items():
        rows = pa.table({"task": log.items["task"], "value": column}).group_by("task", use_threads=False)
        values = rows.aggregate([("value", "first")])
        units = pc.coalesce(values["value_first"].take(pc.index_in(tasks, values["task"])), tasks).to_pylist()
        if 1 < (num := len({*units})) < len(units):
            test = replace(rules, unit=SamplingUnit(name)).test(replace(outcomes, units=tuple(units)))
            low, high = sorted(rules.span.width * float(limit[0]) for limit in test.interval(alpha))
            clusters.append(Clusters(name, num, len(units), low, high))
    return max(clusters, key=lambda found: found.high - found.low, default=None)
