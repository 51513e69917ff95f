"""Notes for reports on who answered for a model, and on what its server does not take."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from composer_stages.words import Sentence


def policy_notes(facts: Mapping[str, Any]) -> list[str]:
    """Return notes on what the facts of a policy say of prices, reused answers and refused fields, and cut prompts."""
    reused, fields = facts.get("reused"), facts.get("refused_fields")
    lines = [Sentence("policy.answers-reused", source=None, number=reused, days=facts["reused_from"])] if reused else []
    lines += [Sentence("policy.fields-left-out", fields=fields)] if fields else []
    lines += [Sentence("policy.prompts-cut", number=facts["cut_prompts"])] if facts.get("cut_prompts") else []
    lines += [Sentence("policy.prices-of-table", source=facts["prices"])] if facts.get("prices") else []
    return [f"Note: {line}." for line in lines]


def answered_by(counts: Counter[tuple[str | None, ...]], requested: str, arm: str = "") -> list[str]:
    """Return a note on who answered, where that was not the asked model alone, of one provider and fingerprint.

    counts: answers by model, provider and fingerprint, as the server names them.
    """
    if len(counts) <= 1 and {model for model, _, _ in counts} <= {requested, None}:
        return []
    lines = [
        (model or "?", provider, fingerprint if len({entry[2] for entry in counts}) > 1 else None, number)
        for (model, provider, fingerprint), number in counts.most_common(6)
    ]
    return [f"Note: {Sentence('policy.answered-by', arm=arm, asked=requested, served=lines, kinds=len(counts))}."]
