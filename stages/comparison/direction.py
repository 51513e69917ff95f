"""Whether lower scores are better: what the logs say of their metric, or the user; it is never guessed from scores."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from composer_stages.errors import BadInput
from composer_stages.formats.measurement import ScoreKind

if TYPE_CHECKING:
    from composer_stages.comparison.logs import ReadLog


def lower_is_better(logs: Sequence["ReadLog"], choice: bool | None) -> bool:
    """Return whether lower values of the chosen scores are better. choice: the user's, which counts above the logs.

    Raises `BadInput` where a log mixes metrics in both directions, where two logs differ, and where none says it of a
    metric that has lower values as the better ones by most definitions.
    """
    kinds = [log.kinds(log.chosen) for log in logs]
    for log, of_log in zip(logs, kinds, strict=True):
        if {kind.may_be_lower for kind in of_log} == {True, False}:
            raise BadInput("comparison.mixed-directions", name=log.name, metrics=_named(of_log))
    if choice is not None:
        return choice
    declared = {kind for of_log in kinds for kind in of_log if kind.higher_is_better is not None}
    directions = {kind.higher_is_better for kind in declared}
    if len(directions) > 1:
        named = [(log.name, _named(of_log)) for log, of_log in zip(logs, kinds, strict=True) if of_log]
        raise BadInput("comparison.directions-differ", logs=named)
    declared_names = {kind.name for kind in declared}
    unsaid = {kind for of_log in kinds for kind in of_log if kind.higher_is_better is None}
    doubtful = {kind for kind in unsaid if kind.may_be_lower or (False in directions and kind.metric)}
    if doubtful := {kind for kind in doubtful if kind.name not in declared_names}:
        raise BadInput("comparison.direction-unknown", metrics=_named(doubtful))
    return False in directions


def _named(kinds: Iterable[ScoreKind]) -> list[str]:
    return sorted({str(kind) for kind in kinds})
