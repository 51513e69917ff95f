"""JSON of other programs: text within a depth that every reader and writer here can take, and numbers kept exactly.

Readers and writers differ in how deep a value may be nested: orjson writes 254 levels and reads 1,024, Python's json
raises RecursionError near 1,000, as do functions that walk a value, and Arrow's reader has no limit but the stack of
the process, which then ends by SIGSEGV. What comes from elsewhere is therefore measured before it is read.

Python reads and writes integers of any size, NaN and infinities as JSON. orjson, which writes rows and digests, refuses
integers beyond 64 bits, reads them as floats, and writes NaN and infinities as null: `exact` keeps them as text. Values
that JSON lacks (sets, tuples, bytes, mappings with other keys than texts) are written as Python literals.
"""

import ast
import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import orjson

from composer_stages.words import Sentence

MOST_LEVELS = 200
"""Levels of lists and objects that a text may have, below those of every reader and writer."""
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in STEPS)


class TooDeep(ValueError):
    """A text is nested too deeply to be read."""


def depth(text: bytes | str) -> int:
    """Return the number of levels of lists and objects in a JSON text, or an upper bound of at most `MOST_LEVELS`.

    A text that is not JSON has some number, too; several values behind each other have that of the deepest.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    if (most := data.count(b"[") + data.count(b"{")) <= MOST_LEVELS:
        return most
    if b"\0" in data[:4]:  # UTF-16 or UTF-32, which json.loads reads
        return depth(data.decode(json.detect_encoding(data), "replace"))
    # Brackets within strings do not count. A backslash escapes the character behind it, so pairs of them go first.
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = b"".join(bare.split(b'"')[::2]).translate(None, NO_BRACKETS)
    return max(accumulate(map(STEPS.__getitem__, brackets)), default=0)


def require_shallow(text: bytes | str) -> None:
    """Raise `TooDeep` for a text of more than `MOST_LEVELS` levels."""
    if (levels := depth(text)) > MOST_LEVELS:
        raise TooDeep(Sentence("nested-too-deeply", levels=levels, limit=MOST_LEVELS))


def loads(text: bytes | str, **options: Any) -> Any:
    """Return the value of a JSON text, as `json.loads` does; `TooDeep` for one that is nested too deeply.

    To measure a text takes as long as to read it.
    """
    require_shallow(text)
    return json.loads(text, **options)


LONG_INTEGER = re.compile(rb"(?<![\d.])\d{19,}(?![\d.eE])")
"""Integers that may be beyond 64 bits, of which orjson makes floats."""


def strict_loads(text: str) -> Any:
    """Return the value of a JSON text as orjson reads it, but integers of any size; `ValueError` for other texts."""
    require_shallow(text)
    data = text.encode()
    value = orjson.loads(LONG_INTEGER.sub(b"0", data))
    return json.loads(text) if LONG_INTEGER.search(data) else value


def dumps(value: Any) -> str:
    """Return a value as a short JSON text, as orjson writes it, but with integers of any size."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


NUMBER, LITERAL = "$number", "$python"
"""Keys of an object that stands for a number, or for a Python literal, whose text it has: {"$python": "{1, 2}"}."""
MARKED = re.compile(r"\$+(number|python)")
"""Keys that get another `$` in front, so that no object of the value itself is taken for one of these."""
NAMES = {"nan": math.nan, "inf": math.inf}


def exact(value: Any) -> Any:
    """Return a value as JSON in which what orjson would change or refuse is an object with its text.

    All else stays as it is, and so do digests. `restored` returns the value.
    """
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {f"${key}" if MARKED.fullmatch(key) else key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict | tuple | set | bytes | complex):
        return {LITERAL: repr(value)}
    return {NUMBER: repr(value)} if _is_changed(value) else value


def restored(value: Any) -> Any:
    """Return the value that `exact` was given."""
    if isinstance(value, dict):
        if value.keys() == {NUMBER}:
            text = value[NUMBER]
            return float(text) if text.lstrip("-") in NAMES else int(text)
        if value.keys() == {LITERAL}:
            return literal(value[LITERAL])
        return {key[1:] if MARKED.fullmatch(key) else key: restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def literal(text: str) -> Any:
    """Return the value of a Python literal, in which nan and inf are numbers; ValueError for any other text."""
    try:
        return ast.literal_eval(_Numbers().visit(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


class _Numbers(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(NAMES[node.id]) if node.id in NAMES else node


def read_literals(value: Any) -> Any:
    """Return a JSON value with the objects {"$python": text} read as their literals; ValueError for other texts."""
    if isinstance(value, dict):
        if value.keys() == {LITERAL} and isinstance(text := value[LITERAL], str):
            return literal(text)
        return {key: read_literals(item) for key, item in value.items()}
    return [read_literals(item) for item in value] if isinstance(value, list) else value


def changed_numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a JSON value that orjson would change or refuse."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from changed_numbers(item)
    elif _is_changed(value):
        yield value


def _is_changed(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -(2**63) <= value < 2**64
