"""Secrets of the usual shapes replaced by their kind, and what JSON or UTF-8 cannot hold made storable."""

import math
import re
from collections import Counter
from typing import Any

SHAPES = {
    "private-key": ("", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----.{16,8000}?-----END (?:[A-Z]+ )*PRIVATE KEY-----"),
    "anthropic-key": (r"\b", r"sk-ant-[\w-]{20,}"),
    "openrouter-key": (r"\b", r"sk-or-v1-[0-9a-f]{32,}"),
    "openai-key": (r"\b", r"sk-(?:(?:proj|svcacct|admin)-[\w-]{40,}|[A-Za-z0-9]{32,})"),
    "github-token": (r"\b", r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}"),
    "gitlab-token": (r"\b", r"glpat-[\w-]{20,}"),
    "huggingface-token": (r"\b", r"hf_[A-Za-z0-9]{30,}"),
    "aws-key": (r"\b", r"(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
    "aws-secret": (r"(?i:aws_secret_access_key)[\"'\\]*\s*[=:]\s*[\"'\\]*", r"[A-Za-z0-9/+]{40}\b"),
    "google-key": (r"\b", r"AIza[\w-]{35}"),
    "slack-token": (r"\b", r"xox[abeoprs]-[A-Za-z0-9-]{20,}"),
    "stripe-key": (r"\b", r"[rs]k_live_[A-Za-z0-9]{20,}"),
    "npm-token": (r"\b", r"npm_[A-Za-z0-9]{36}\b"),
    "pypi-token": (r"\b", r"pypi-AgE[\w-]{50,}"),
    "sendgrid-key": (r"\b", r"SG\.[\w-]{20,}\.[\w-]{30,}"),
    "jwt": (r"\b", r"eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}"),
    "authorization": (r"(?i:authorization[\"'\\]*: *[\"'\\]*(?:bearer|token|basic) )", r"[\w.~+/=-]{20,}"),
    "url-password": (r"://[\w.%+-]{1,64}:", r"[^\s:/@'\"{}<>$\\]{6,64}(?=@[\w.-])"),
}
"""What stands before a secret and stays, and the secret, by kind. Private keys may have escaped line ends."""
SECRET = re.compile(
    "|".join(
        f"(?P<{name.replace('-', '_')}>{before}(?P<{name.replace('-', '_')}_>{it}))"
        for name, (before, it) in SHAPES.items()
    ),
    re.DOTALL,
)
HINT = re.compile(
    r"PRIVATE KEY|sk-|gh[pousr]_|github_pat_|glpat-|hf_|AKIA|ASIA|(?i:aws_secret)|AIza|xox|k_live_|npm_|pypi-AgE|SG\."
    r"|eyJ|(?i:authorization)|://[^\s/@]{1,64}:[^\s/@]{1,64}@"
)
"""What every shape contains: most strings have none of it and are passed over quickly."""
DEEPEST = 200
SURROGATE = re.compile("[\ud800-\udfff]")


def redact(text: str, counts: Counter[str]) -> str:
    """A text with `[redacted: KIND]` in place of each secret, which is counted by kind."""
    if not HINT.search(text):
        return text

    def replace(match: re.Match[str]) -> str:
        name = str(match.lastgroup)
        kind = name.replace("_", "-")
        counts[kind] += 1
        return f"{text[match.start() : match.start(f'{name}_')]}[redacted: {kind}]"

    return SECRET.sub(replace, text)


def clean(value: Any, counts: Counter[str], depth: int = 0) -> Any:
    """A JSON value with its texts redacted and everything made storable.

    NaN and infinities become null, integers beyond 64 bits text, and lone surrogates U+FFFD.

    Raises `ValueError` where it is nested deeper than can be written again.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        return redact(SURROGATE.sub("\ufffd", value), counts)
    if isinstance(value, dict):
        return {clean(key, counts): clean(item, counts, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, counts, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
