"""Redaction of servers' keys from all files and output, also where a server sends a key back.

A key is registered when it is read from its variable (`secret_in`). Text of a server is redacted where it enters
(`stages.policy.client`), and again where files are written (`stages.runs.store`) and where text is shown to the user
(`composer_cli.printing`).
"""

import html
import json
import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from stages.errors import UsageError

MARK = "[redacted key]"
SHORTEST = 8
"""Characters. A shorter value is no secret, and would be found in words that have nothing to do with it."""


@dataclass
class Secrets:
    """Values to redact."""

    _spellings: list[str] = field(default_factory=list)
    """Longest first: a secret that is part of another one is replaced after it."""

    def keep(self, value: str) -> None:
        """Redact this value from now on, also in its spellings in JSON, Python, HTML and URLs.

        A value of fewer than 8 characters is ignored.
        """
        if len(value) < SHORTEST:
            return
        # What a server sends back may be quoted in a log, an error's repr, a page or an address.
        as_json = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        spellings = (value, *as_json, repr(value)[1:-1], html.escape(value), quote(value, safe=""))
        self._spellings = sorted({*self._spellings, *spellings}, key=lambda secret: (-len(secret), secret))

    def redacted(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in self._spellings:
            text = text.replace(secret, MARK)
        return text

    def redacted_bytes(self, data: bytes) -> bytes:
        """Return the bytes without secrets."""
        for secret in self._spellings:
            data = data.replace(secret.encode(), MARK.encode())
        return data

    def redacted_value(self, value: Any) -> Any:
        """Return a JSON-like value with every text in it redacted, keys of objects included."""
        if not self._spellings:  # most runs have no key, and every row that is written passes here
            return value
        if isinstance(value, str):
            return self.redacted(value)
        if isinstance(value, dict):
            return {self.redacted_value(key): self.redacted_value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.redacted_value(item) for item in value)
        return value


_OF_THIS_PROCESS = Secrets()
keep_secret = _OF_THIS_PROCESS.keep
redacted = _OF_THIS_PROCESS.redacted
redacted_bytes = _OF_THIS_PROCESS.redacted_bytes
redacted_value = _OF_THIS_PROCESS.redacted_value


def secret_in(variable: str) -> str:
    """Return the stripped value of an environment variable and redact it from now on; empty where it is not set.

    Raises `UsageError` for a value that no request can carry: keys are sent in a header, which is one line of ASCII.
    """
    value = os.environ.get(variable, "").strip()
    keep_secret(value)
    if not value.isascii() or not value.isprintable():
        held = "a line break or another control character" if value.isascii() else "a character that is not ASCII"
        raise UsageError(f"The environment variable {variable} holds {held}, so it is no key. Export the key again.")
    return value
