"""Fields that a user may add to a request; those with which a call could cost more than its limit are refused."""

import re
from typing import Any

LIMITS = ("max_tokens", "max_completion_tokens")
"""Request fields that bound an answer, as a whole number of tokens; a server takes one or the other."""
LENGTHS = {
    *("maxtokens", "maxcompletiontokens", "maxoutputtokens", "maxnewtokens", "maxtokenstosample", "maxgenlen"),
    *("maxlength", "maxgeneratedtokens", "maxresponsetokens", "maxdecodetokens", "maxtoken", "tokenstogenerate"),
    *("numpredict", "npredict", "outputtokenlimit", "maxthinkingtokens", "maxreasoningtokens", "budgettokens"),
    *("thinkingbudget", "reasoningbudget"),
}
"""Names by which servers know the length of an answer or of its reasoning, in lower case and without signs."""
SEVERAL = {
    *("n", "bestof", "numcompletions", "numreturnsequences", "candidatecount", "numgenerations", "numresults"),
    *("usebeamsearch", "beamwidth", "numbeams", "stream", "messages", "prompt", "model", "models"),
}
"""Names of fields with which a request has several answers, a stream of one, or another conversation or model."""
NESTED = {"options", "generationconfig", "parameters", "extrabody", "samplingparams", "google", "thinkingconfig"}
"""Objects in which servers look for such fields, too. Others, such as a JSON schema, may hold properties so called."""
THOUGHTS = {"reasoning", "thinking", "thinkingconfig"}
"""Objects with a limit for reasoning, whose tokens are part of the answer's."""


def unbounded(where: str, given: dict[str, Any], longest: int, within: str = "", thoughts: bool = False) -> str | None:
    """Return what is wrong with request fields that let a call cost more than `max_tokens` allows; None for nothing.

    longest: tokens of the longest answer. within, thoughts: the object in which the fields are, and whether it is one
    of `THOUGHTS`.
    """
    for key, value in given.items():
        name = re.sub(r"[^a-z0-9]", "", str(key).lower())
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in SEVERAL:
            return (
                f"{where} cannot set {within}{key}: a request is one answer of one model, in the ledger and the cache"
            )
        if key in LIMITS and not within:
            if not is_count and not (value is False and where == "request"):
                return f"{where}.{key} is {value!r}: give a whole number of tokens above 0, without quotes"
        elif name in LENGTHS and not (thoughts and is_count and value <= longest):
            return (
                f"{where} cannot set {within}{key} to {value!r}, which could make an answer longer than money is "
                f"reserved for ({longest} tokens): give max_tokens, or request.max_completion_tokens"
            )
        inner = value if name in NESTED | THOUGHTS and isinstance(value, dict) else {}
        if fault := unbounded(where, inner, longest, f"{within}{key}.", name in THOUGHTS):
            return fault
    return None
