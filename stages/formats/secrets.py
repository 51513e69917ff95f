"""Replace likely secrets in records of other programs by their kind, and make values storable.

A text is a likely secret if it has the prefix of a provider's keys or, for kinds without a prefix (passwords in
addresses, authorization headers), if it is random enough and no placeholder: `userid:password@example.com` is kept.
"""

import base64
import binascii
import math
import re
from collections import Counter
from contextlib import suppress
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.json_text import MOST_LEVELS, TooDeep

SHAPES: dict[str, list[str]] = load_toml(__package__, "secrets.toml")
"""By kind, the pattern before a secret, which is kept, and the pattern of the secret."""
SECRET = re.compile(
    "|".join(
        f"(?P<{name.replace('-', '_')}>{before}(?P<{name.replace('-', '_')}_>{it}))"
        for name, (before, it) in SHAPES.items()
    ),
    re.DOTALL,
)
DOUBTFUL = frozenset({"aws-secret", "authorization", "url-password"})
"""Kinds without a known prefix, decided by randomness."""
PLACEHOLDER = re.compile(
    r"pass|pwd|secret|example|test|user|token|dummy|fake|sample|change|admin|root|guest|foo|bar|1234|abcd|xxx|key|login",
    re.IGNORECASE,
)
NOWHERE = re.compile(
    r"@(?:[\w.-]*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)\b|@(?:host|server|domain)\b|@127\.", re.I
)
LEAST_BITS, RANDOM_BITS = 24.0, 100.0
"""Randomness of a secret in bits, at least: Shannon's entropy of its characters times their number. From the second
number on, words of `PLACEHOLDER` in it are chance."""
BESIDE = 24
"""Characters of a preview before and after the secret."""
HINT = re.compile(
    r"PRIVATE KEY|sk-|gh[pousr]_|github_pat_|glpat-|hf_|AKIA|ASIA|(?i:aws_secret)|AIza|xox|k_live_|npm_|pypi-AgE|SG\."
    r"|eyJ|(?i:authorization)|://[^\s/@]{1,64}:[^\s/@]{1,64}@"
)
"""A pattern that every shape contains: most strings do not match and are skipped quickly."""
SURROGATE = re.compile("[\ud800-\udfff]")


class Redactions(Counter[str]):
    """Numbers of redacted secrets by kind, and a preview (kind, surrounding text without the secret) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.previews: list[tuple[str, str]] = []


def redact(text: str, counts: Counter[str]) -> str:
    """Replace each likely secret of a text by `[redacted: KIND]`, and count these by kind."""
    if not HINT.search(text):
        return text

    def replace(match: re.Match[str]) -> str:
        name = str(match.lastgroup)
        kind, start, end = name.replace("_", "-"), match.start(f"{name}_"), match.end(f"{name}_")
        if not _likely(kind, match[f"{name}_"], match, text):
            return match[0]
        counts[kind] += 1
        if isinstance(counts, Redactions):
            around = text[max(0, start - BESIDE) : start], text[end : end + BESIDE]
            # Another secret may be next to this one; previews are written to `sources.json` and the report.
            hidden = SECRET.sub("[...]", around[0]), SECRET.sub("[...]", around[1])
            counts.previews.append((kind, f"{hidden[0]}[{kind}, {end - start} characters]{hidden[1]}"))
        return f"{text[match.start() : start]}[redacted: {kind}]"

    return SECRET.sub(replace, text)


def _likely(kind: str, secret: str, match: re.Match[str], text: str) -> bool:
    """Whether a match is likely a secret rather than an example of one."""
    # Amazon's documentation uses `AKIAIOSFODNN7EXAMPLE`.
    if kind == "aws-key":
        return not secret.endswith("EXAMPLE")
    if kind not in DOUBTFUL:
        return True
    if kind == "url-password" and NOWHERE.match(text, match.end()):
        return False
    if kind == "authorization" and "basic" in match[0].lower():
        with suppress(binascii.Error, ValueError):
            # The base64 of USER:PASSWORD: the randomness that counts is the password's.
            secret = base64.b64decode(secret, validate=True).decode().partition(":")[2] or secret
    mixed = any(c.isdigit() for c in secret) and any(c.isalpha() for c in secret)
    counts = Counter(secret).values()
    random = -sum(count * math.log2(count / len(secret)) for count in counts)
    chosen = "example" in secret.lower() or (random < RANDOM_BITS and PLACEHOLDER.search(secret) is not None)
    return mixed and not chosen and random >= LEAST_BITS


def clean(value: Any, counts: Counter[str] | None, depth: int = 0) -> Any:
    """Return a value that JSON and UTF-8 can hold, with its texts redacted unless `counts` is None.

    NaN and infinities become null, integers beyond 64 bits text, and lone surrogates U+FFFD.

    Raises `TooDeep` if it is nested deeper than can be written again.
    """
    if depth > MOST_LEVELS:
        raise TooDeep(f"it is nested deeper than {MOST_LEVELS} levels, and no more are read")
    if isinstance(value, str):
        text = value if value.isascii() else SURROGATE.sub("\ufffd", value)
        return text if counts is None else redact(text, counts)
    if isinstance(value, dict):
        return {clean(key, counts): clean(item, counts, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, counts, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
