"""Redaction of servers' keys from all files and output, also where a server sends a key back.

A key is registered when it is read from its variable (`secret_in`). Text of a server is redacted where it enters
(`composer_stages.policy.client`), and again where files are written (`composer_stages.runs.store`) and where text is
shown to the user (`composer_cli.printing`).

A key is found in the encodings that programs use for text, and in mixtures of them: escapes of JSON, Python, HTML and
URLs for any of its characters, hex, base64 wherever in the encoded text it begins, base32, reversed, and with signs
between its characters. No search finds every encoding: a server that wants to hide a key can encrypt it.
"""

import base64
import html
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from composer_stages.errors import UsageError

MARK = "[redacted key]"
SHORTEST = 8
"""Characters. A shorter value is no secret, and would be found in words that have nothing to do with it."""
LONG = 16
"""Characters from which a secret is also searched for with signs between its characters: lists of 8 digits exist."""
BETWEEN = r"(?:\\{1,8}[nrt]|[\s\\\"'`,.:;+|\-_]){0,8}"
"""What may stand between the characters of a key that is spelled out, or between the lines of wrapped base64."""


ESCAPE = re.compile(
    rb"\\{1,8}(?:[nrt]|u00([0-9a-fA-F]{2})|u\{0*([0-9a-fA-F]{1,6})\}|u[0-9a-fA-F]{4}|x([0-9a-fA-F]{2})|0?([0-7]{2,3}))"
    rb"|%(?:25)*(?:u00)?([0-9a-fA-F]{2})|&#[xX]0*([0-9a-fA-F]{1,6});?|&#0*([0-9]{1,7});?"
)
BASES = (16, 16, 16, 8, 16, 16, 10)
"""Of the digits in its groups."""
SIGNS = bytes(range(33)) + b"\"'`,.:;+|-_/\\=()[]{}<>*#~^&" + bytes(range(127, 256))
"""Bytes that count for nothing in the search for a key that is spelled out."""


@dataclass
class Secrets:
    """Values to redact."""

    _spellings: list[str] = field(default_factory=list)
    """Longest first: a secret that is part of another one is replaced after it."""
    _values: set[str] = field(default_factory=set)
    _needles: tuple[tuple[bytes, ...], tuple[bytes, ...]] = ((), ())
    """What a text with a key in another encoding holds once it is reduced: as it is, and in lower case."""
    _patterns: "tuple[re.Pattern[str], re.Pattern[bytes]] | None" = None
    """Of all values in all encodings; made when one is found for the first time."""

    def keep(self, value: str) -> None:
        """Redact this value from now on, also in other encodings.

        A value of fewer than 8 characters is ignored.
        """
        if len(value) < SHORTEST or value in self._values:
            return
        # What a server sends back may be quoted in a log, an error's repr, a page or an address.
        as_json = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        spellings = (value, *as_json, repr(value)[1:-1], html.escape(value), quote(value, safe=""))
        self._spellings = sorted({*self._spellings, *spellings}, key=lambda secret: (-len(secret), secret))
        exact, lower = _needles(value.encode())
        self._needles = (self._needles[0] + exact, self._needles[1] + lower)
        self._values.add(value)
        self._patterns = None

    def redacted(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in self._spellings:
            text = text.replace(secret, MARK)
        if self._spellings and self._perhaps_in(text.encode(errors="replace")):
            text = self._compiled()[0].sub(MARK, text)
        return text

    def redacted_bytes(self, data: bytes) -> bytes:
        """Return the bytes without secrets."""
        for secret in self._spellings:
            data = data.replace(secret.encode(), MARK.encode())
        if self._spellings and self._perhaps_in(data):
            data = self._compiled()[1].sub(MARK.encode(), data)
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

    def _perhaps_in(self, data: bytes) -> bool:
        """Return whether a secret may be in this text in another encoding: a quick check before a slow search."""
        # The search takes 0.3 ms for a kB, this one 0.01: escapes are decoded, signs are left out, what remains is
        # compared with a few fixed texts. Escapes of escapes need another round.
        for _ in range(3):
            reduced = data.translate(None, SIGNS)
            if any(needle in reduced for needle in self._needles[0]):
                return True
            reduced = reduced.lower()
            if any(needle in reduced for needle in self._needles[1]):
                return True
            if b"\\" not in data and b"%" not in data and b"&#" not in data:
                return False
            previous, data = data, ESCAPE.sub(_decoded, data)
            if data == previous:
                return False
        return False

    def _compiled(self) -> "tuple[re.Pattern[str], re.Pattern[bytes]]":
        if self._patterns is None:
            longest_first = sorted(self._values, key=lambda secret: (-len(secret), secret))
            pattern = "|".join(encoding for secret in longest_first for encoding in _encodings(secret))
            self._patterns = re.compile(pattern), re.compile(pattern.encode())
        return self._patterns


def _decoded(match: "re.Match[bytes]") -> bytes:
    index = match.lastindex
    if index is None:
        return b""
    code = int(match[index], BASES[index - 1])
    return bytes([code]) if code < 128 else b""


def _needles(secret: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Return what is left of a secret in each encoding without `SIGNS`: with its case, and in lower case."""
    base64s, base32s = _aligned(secret, base64.b64encode, 6), _aligned(secret, base64.b32encode, 5)
    hexes = [secret.hex().encode(), b"".join(b"0x%02x" % byte for byte in secret)]
    exact = [text.translate(None, SIGNS) for text in (secret, secret[::-1], *base64s)]
    # Of a key in another script nothing may be left, and everything would hold that.
    return tuple(n for n in exact if len(n) >= SHORTEST), tuple(text.lower() for text in (*base32s, *hexes))


def _aligned(secret: bytes, encode: Callable[[bytes], bytes], bits: int) -> list[bytes]:
    """Return what an encoding with so many bits a sign writes of a text with the secret in it, by where that begins.

    Without the signs at its ends, which depend on what is around it.
    """
    alignments = range(3 if bits == 6 else bits)
    return [encode(bytes(n) + secret)[-(-n * 8 // bits) : (n + len(secret)) * 8 // bits] for n in alignments]


def _encodings(secret: str) -> Iterator[str]:
    """Yield regular expressions for a secret in the encodings that are no fixed text."""
    data = secret.encode()
    between = BETWEEN if len(secret) >= LONG else ""
    for characters in (secret, secret[::-1]):
        yield between.join(map(_spelled, characters))
    # Hex, its bytes apart or not: 736b, 73:6B, \\x73\\x6b, 0x73, 0x6b, %73%6B.
    yield r"(?:[\s:,;%\-]|\\{1,8}x|0x){0,4}".join(_any_case(f"{byte:02x}") for byte in data)
    for encoded in _aligned(data, base64.b64encode, 6):
        yield BETWEEN.join(map(_base64_sign, encoded.decode()))
    for encoded in _aligned(data, base64.b32encode, 5):
        yield _any_case(encoded.decode())


def _spelled(character: str) -> str:
    """Return an expression for a character as itself or escaped, by any of several programs."""
    spellings = [re.escape(character)]
    units = character.encode("utf-16-be")  # JSON escapes characters above U+FFFF as two
    spellings += ["".join(rf"\\{{1,8}}u{_any_case(units[i : i + 2].hex())}" for i in range(0, len(units), 2))]
    spellings += ["".join(f"%u{_any_case(units[i : i + 2].hex())}" for i in range(0, len(units), 2))]
    spellings.append("".join(f"%(?:25)*{_any_case(f'{byte:02x}')}" for byte in character.encode()))
    spellings.append(
        "".join(rf"(?:\\{{1,8}}x{_any_case(f'{byte:02x}')}|\\{{1,8}}0?{byte:o})" for byte in character.encode())
    )
    spellings.append(rf"\\{{1,8}}u\{{0*{_any_case(f'{ord(character):x}')}\}}")
    spellings.append(rf"&#(?:0*{ord(character)}|[xX]0*{_any_case(f'{ord(character):x}')});?")
    if character in "\"'&<>/\\":
        spellings += [rf"\\{{1,8}}{re.escape(character)}", re.escape(html.escape(character))]
    return f"(?:{'|'.join(spellings)})"


def _any_case(text: str) -> str:
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in text)


def _base64_sign(sign: str) -> str:
    return {"+": r"(?:[+\-]|%2[bB]|\\{1,8}u002[bB])", "/": r"(?:[/_]|\\{1,8}/|%2[fF]|\\{1,8}u002[fF])"}.get(sign, sign)


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
        raise UsageError("variable-is-no-key", variable=variable, is_ascii=value.isascii())
    return value
