"""Whether lower scores are better: what the logs say of their metric, or the user; it is never guessed from scores."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from composer_stages.errors import BadInput

if TYPE_CHECKING:
    from composer_stages.comparison.logs import ReadLog

MAY_BE_LOWER = re.compile(
    r"(?<![a-z])(perplexity|ppl|nll|loss|entropy|bits_per_\w+|wer|cer|ter|brier|mae|mse|rmse|ece|latency|error_rate|"
    r"bias|stereotype|toxicity|errors?$)(?![a-z])",
    re.IGNORECASE,
)
"""Names of metrics of which lower values are better by most definitions. Logs that do not say so are asked about."""


class ScoreMetric(NamedTuple):
    """A metric that scores of a log are of, and whether higher ones are better; None where the log does not say."""

    name: str
    higher_is_better: bool | None

    @property
    def may_be_lower(self) -> bool:
        """Return whether lower values are better, or the name has that meaning and the log does not say."""
        return self.higher_is_better is not True and (
            self.higher_is_better is False or bool(MAY_BE_LOWER.search(self.name))
        )

    def __str__(self) -> str:
        """Return the name, and what the log says of it."""
        direction_words = {True: " (higher is better)", False: " (lower is better)", None: ""}
        return f"{self.name or 'a metric without a name'}{direction_words[self.higher_is_better]}"


def lower_is_better(logs: Sequence["ReadLog"], choice: bool | None) -> bool:
    """Return whether lower scores are better. choice: the user's, which counts above that of the logs.

    Raises `BadInput` where a log mixes metrics in both directions, where two logs differ, and where none says it of a
    metric that has lower values as the better ones by most definitions.
    """
    for log in logs:
        if {metric.may_be_lower for metric in log.metrics} == {True, False}:
            raise BadInput("comparison.mixed-directions", name=log.name, metrics=_named(log.metrics))
    if choice is not None:
        return choice
    declared = {metric for log in logs for metric in log.metrics if metric.higher_is_better is not None}
    directions = {metric.higher_is_better for metric in declared}
    if len(directions) > 1:
        named = [(log.name, _named(log.metrics)) for log in logs if log.metrics]
        raise BadInput("comparison.directions-differ", logs=named)
    declared_names = {metric.name for metric in declared}
    unsaid = {
        metric
        for log in logs
        for metric in log.metrics
        if metric.higher_is_better is None and metric.name not in declared_names
    }
    if doubtful := {metric for metric in unsaid if metric.may_be_lower or False in directions}:
        raise BadInput("comparison.direction-unknown", metrics=_named(doubtful))
    return False in directions


def _named(metrics: Iterable[ScoreMetric]) -> list[str]:
    return sorted(map(str, metrics))
