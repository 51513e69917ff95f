"""Fill the sentences of comparison.jinja, which need nothing but the records of a comparison."""

from collections.abc import Mapping

from composer_stages.evaluation.sentences import Sentences
from composer_stages.formats.measurement import CANCELLED


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
)
