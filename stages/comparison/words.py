"""Fill the sentences of comparison.jinja, which need nothing but the records of a comparison."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer_stages.comparison.sides import TaskMatch
from composer_stages.evaluation.difference import Difference
from composer_stages.evaluation.sentences import Sentences
from composer_stages.formats.measurement import CANCELLED

if TYPE_CHECKING:
    from composer_stages.comparison.decision import SettingDifference


def describe_reasons(counts: Mapping[str, int]) -> str:
    """Return how many samples have no score for each reason, the most frequent first.

    Those that were cancelled come last: what failed before them says why.
    """
    in_order = sorted(counts.items(), key=lambda item: (item[0] == CANCELLED, -item[1]))
    return ", ".join(f"{number:,} {reason}" for reason, number in in_order)


SENTENCES = Sentences(
    "composer_stages.comparison",
    "comparison.jinja",
    reasons=describe_reasons,
    rounded=lambda number: f"{float(f'{number:.2g}'):,.0f}",
    general=lambda number: f"{number:.6g}",
)


def describe_too_few(difference: Difference) -> str:
    """Return that a test has too few units, as a clause; empty where it has enough."""
    return SENTENCES.text("too_few", difference) if difference.too_few else ""


def describe_match(matched: TaskMatch) -> str:
    """Return how tasks were matched, as a clause; empty for by their ids."""
    return SENTENCES.text("match", matched)


def describe_setting(setting: "SettingDifference") -> str:
    """Return a setting by which logs were made differently, as a clause."""
    return SENTENCES.text("setting", setting)
