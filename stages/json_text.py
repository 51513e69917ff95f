"""JSON text of other programs, read within a depth that every reader and writer here can take.

Readers and writers differ in how deep a value may be nested: orjson writes 254 levels and reads 1,024, Python's json
raises RecursionError near 1,000, as do functions that walk a value, and Arrow's reader has no limit but the stack of
the process, which then ends by SIGSEGV. What comes from elsewhere is therefore measured before it is read.
"""

import json
from itertools import accumulate
from typing import Any

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
        raise TooDeep(f"it is nested {levels:,} levels deep, and at most {MOST_LEVELS} are read")


def loads(text: bytes | str, **how: Any) -> Any:
    """Return the value of a JSON text, as `json.loads` does; `TooDeep` for one that is nested too deeply.

    To measure a text takes as long as to read it.
    """
    require_shallow(text)
    return json.loads(text, **how)
