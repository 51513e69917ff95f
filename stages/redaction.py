"""Keys of servers are kept out of everything that is written or shown, also where a server sends them back.

A key is known from the moment at which it is read from its variable (`PolicyConfig.key`). Text of a server is redacted
where it enters (`stages.policy.client`), and once more where files are written (`stages.runs.store`) and where people
are spoken to (`composer_cli.errors`).
"""

import html
import json
from typing import Any
from urllib.parse import quote

MARK = "[redacted key]"
SHORTEST = 8
"""Characters. A shorter value is no secret, and would be found in words that have nothing to do with it."""

_spellings: set[str] = set()


def keep_secret(value: str) -> None:
    """From now on this value is redacted, also as JSON, Python, HTML and addresses spell it; not below 8 characters."""
    if len(value) >= SHORTEST:
        as_json = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        _spellings.update((value, *as_json, repr(value)[1:-1], html.escape(value), quote(value, safe="")))


def redacted(text: str) -> str:
    """The text without secrets."""
    for secret in _longest_first():
        text = text.replace(secret, MARK)
    return text


def redacted_bytes(data: bytes) -> bytes:
    """The bytes without secrets."""
    for secret in _longest_first():
        data = data.replace(secret.encode(), MARK.encode())
    return data


def redacted_value(value: Any) -> Any:
    """A JSON-like value with every text in it redacted, keys of objects included."""
    if not _spellings:
        return value
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted_value(key): redacted_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redacted_value(item) for item in value)
    return value


def _longest_first() -> list[str]:
    """A secret that is part of another one is looked for after it."""
    return sorted(_spellings, key=len, reverse=True)
