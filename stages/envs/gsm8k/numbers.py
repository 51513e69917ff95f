"""The number that a text answers with."""

import re
from decimal import Decimal

NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
MARKED = re.compile(r"####(.*)")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\\,|\{,\})(?=[0-9]{3}(?![0-9]))")


def answer_number(text: str) -> Decimal | None:
    r"""The first number after the last `####`; if there is none, in the last `\boxed{}`; else the last number of all.

    $1,200.00 is 1200: currency signs, commas between thousands, a full stop behind the number and zeros behind the
    decimal point do not count, a percent sign neither. None where the text holds no number.
    """
    plain = _plain(text)
    for pattern in (MARKED, BOXED):
        if (places := pattern.findall(plain)) and (found := NUMBER.findall(places[-1])):
            return Decimal(found[0])
    found = NUMBER.findall(plain)
    return Decimal(found[-1]) if found else None


def is_marked(text: str) -> bool:
    r"""Whether the text says which number is its answer, behind `####` or in `\boxed{}`."""
    return any(NUMBER.search(place) for pattern in (MARKED, BOXED) for place in pattern.findall(_plain(text))[-1:])


def _plain(text: str) -> str:
    return THOUSANDS.sub("", text.replace("\\$", "").replace("$", "").replace("\N{MINUS SIGN}", "-"))
