"""Characters that steer a terminal or hide in a text are spelled: what models and servers write is not obeyed."""

import re

STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # direction of writing, separators of lines
    "\ud800-\udfff]"  # halves of characters, which no output can encode
)


def visible(text: str) -> str:
    r"""The text with `\x1b` for an escape character, and so on; newlines and tabs stay."""
    return STEERING.sub(lambda found: _spelled(ord(found[0])), text)


def visible_line(text: str) -> str:
    r"""The same on one line: newlines become `\n`."""
    return visible(text).replace("\n", "\\n")


def visible_json(text: str) -> str:
    """The same for a JSON document, which means what it meant before."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spelled(code: int) -> str:
    return {13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
