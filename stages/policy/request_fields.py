"""Fields that a user may add to a request; those with which a call could cost more than its limit are refused."""

import re
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.words import Sentence

LIMITS = ("max_tokens", "max_completion_tokens")
"""Request fields that bound an answer, as a whole number of tokens; a server takes one or the other."""
FIELDS = load_toml(__package__, "request_fields.toml")


def find_unbounded(
    setting: str, fields: dict[str, Any], longest: int, path: str = "", reasoning: bool = False
) -> str | None:
    """Return why request fields let a call cost more than `max_tokens` allows; None where they do not.

    longest: tokens of the longest answer. path: of the object that holds the fields, with a dot at its end. reasoning:
    whether that object limits reasoning.
    """
    for key, value in fields.items():
        name = re.sub(r"[^a-z0-9]", "", str(key).lower())
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in FIELDS["several"] and not (name == "stream" and value is False):
            return Sentence("policy.field-of-several-answers", field=setting, path=path, key=key)
        if key in LIMITS and not path:
            if not is_count and not (value is False and setting == "request"):
                return Sentence("policy.limit-not-a-count", field=setting, key=key, value=value)
        elif name in FIELDS["lengths"] and not (reasoning and is_count and value <= longest):
            return Sentence(
                "policy.field-beyond-limit", field=setting, path=path, key=key, value=value, longest=longest
            )
        limits_reasoning = name in FIELDS["reasoning"]
        inner = value if (limits_reasoning or name in FIELDS["nested"]) and isinstance(value, dict) else {}
        if fault := find_unbounded(setting, inner, longest, f"{path}{key}.", limits_reasoning):
            return fault
    return None
