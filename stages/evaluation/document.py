"""The file `verdict.json`: a verdict with its sentences as JSON, and its differences read again."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from composer_stages.evaluation.difference import Decision, Difference, Reason, ReasonKind
from composer_stages.evaluation.verdict import EvalVerdict
from composer_stages.evaluation.words import VerdictWords, describe_method, describe_verdict

NUMBERS = (
    *("estimate", "low", "high", "num_tasks", "num_units", "num_seeds", "wins", "losses", "p_value", "mde"),
    *("too_few", "elsewhere", "unit", "num_collections"),
)
"""The fields of a difference that the file has by the same names."""
RECORDED = (
    *("decision", "baseline", "treatment", "control", "num_lost", "outcome", "min_gain", "control_trained"),
    "baseline_trained",
)
"""The fields of a verdict that are plain values."""


def verdict_document(verdict: EvalVerdict, words: VerdictWords | None = None) -> dict[str, Any]:
    """Return a verdict with its words, as JSON can hold them."""
    planned = ("gain", "worst", "best", "over_control", "at_zero")
    return {
        **{name: getattr(verdict, name) for name in RECORDED},
        **{name: _difference_document(getattr(verdict, name)) for name in planned},
        "arms": [asdict(arm) for arm in verdict.arms],
        "comparisons": [
            {
                "rate": row.rate,
                "arm": row.treatment,
                "other": row.baseline,
                "difference": _difference_document(row),
                "p_holm": row.p_holm,
            }
            for row in verdict.comparisons
        ],
        "gain_by_seed": verdict.gain_by_seed or None,
        "subsets": [asdict(subset) for subset in verdict.subsets],
        "looks": [{**vars(look), "gain": _difference_document(look.gain)} for look in verdict.looks],
        "differences": [asdict(row) for row in verdict.differences],
        **asdict(words or describe_verdict(verdict)),
    }


def _difference_document(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        **{name: getattr(difference, name) for name in NUMBERS},
        "method": describe_method(difference.method, difference.unit),
        "shows": difference.decision,
    }


def read_differences(document: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of a verdict from the content of its file; the first has the verdict."""
    return [
        read_difference(
            row["difference"],
            rate=row["rate"],
            treatment=row["arm"],
            baseline=row["other"],
            p_holm=row["p_holm"],
            verdict=None if number else document["decision"],
        )
        for number, row in enumerate(document.get("comparisons", ()))
    ]


def read_difference(document: Mapping[str, Any], **names: Any) -> Difference:
    """Return a difference from its part of the file. names: its fields that the part lacks."""
    numbers = {name: document[name] for name in NUMBERS if name in document and name not in ("too_few", "elsewhere")}
    return Difference(
        **numbers,
        **names,
        decision=Decision(document.get("shows", Decision.UNDECIDED)),
        reasons=(Reason.of(ReasonKind.TOO_FEW_UNITS),) if document.get("too_few") else (),
        elsewhere=tuple(document["elsewhere"]) if document.get("elsewhere") else None,
        method=document["method"],
    )
