"""Compare the values of a test process with expected ones, outside of every process that ran code under test.

Values arrive as tagged JSON (guest/composer_values.py: `tagged`) and become objects of built-in types and a few
types of the standard library: no method of an object of the code under test takes part in a comparison. Matchers of
many values (pytest.approx, mock.ANY) are read among expected values alone.
"""

import json
import math
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import ANY
from uuid import UUID

from composer_stages.sandbox.guest.values import DECODERS, decoded, refuse_chosen_hashes
from composer_stages.words import Sentence


class Incomparable(ValueError):
    """A value is, or holds, an object that cannot be compared outside; the text is the name of its type."""


class EqualToAnything(Incomparable):
    """The object agrees with whatever it is compared with."""


@dataclass(frozen=True)
class ClassName:
    """A class by the names of its bases, itself first; names of classes that are not built in start with a tilde."""

    bases: tuple[str, ...]


@dataclass(frozen=True)
class DataObject:
    """An object of a dataclass: its class and the fields that it is compared by."""

    name: str
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Approximately:
    """Equal to numbers within a tolerance, as pytest.approx."""

    expected: Any
    tolerance: Any
    nan_is_equal: bool

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, int | float | complex | Decimal | Fraction):
            return False
        if value == self.expected:
            return True
        if value != value or self.expected != self.expected:
            return self.nan_is_equal and value != value and self.expected != self.expected
        distance = abs(self.expected - value)
        return bool(distance <= self.tolerance) and distance != math.inf

    __hash__ = None  # type: ignore[assignment]


def _refuse(fields: list[Any], read: Callable[[Any], Any]) -> Any:
    raise Incomparable(str(fields[0])[:80])


def _refuse_agreeing(fields: list[Any], read: Callable[[Any], Any]) -> Any:
    raise EqualToAnything(str(fields[0])[:80])


def _set(fields: list[Any], read: Callable[[Any], Any]) -> frozenset[Any]:
    members = [read(field) for field in fields]
    refuse_chosen_hashes(members)
    return frozenset(members)


TYPES: dict[str, Callable[..., Any]] = {
    "Decimal": Decimal,
    # Of whole numbers alone: of a text with an exponent it takes seconds.
    "Fraction": lambda *terms: Fraction(*map(operator.index, terms)),
    "UUID": UUID,
    "Path": PurePosixPath,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": timedelta,
    "complex": complex,
}
SENT = DECODERS | {
    "b": lambda fields, read: bytes.fromhex(fields[0]),
    "e": _set,
    "k": lambda fields, read: ClassName(tuple(map(str, fields))),
    "x": lambda fields, read: TYPES[fields[0]](*map(read, fields[1:])),
    "c": lambda fields, read: DataObject(
        str(fields[0]), tuple((read(name), read(value)) for name, value in fields[1:])
    ),
    "o": _refuse,
    "same": _refuse_agreeing,
}
EXPECTED = SENT | {
    "approx": lambda fields, read: Approximately(read(fields[0]), read(fields[1]), bool(fields[2])),
    "any": lambda fields, read: ANY,
}
"""Only expected values, which a process without an agent's code sent, may equal many values."""


def read(text: str, *, expected: bool = False) -> Any:
    """Decode a value; `Incomparable` for an object of another type, any Exception for a malformed text."""
    return decoded(json.loads(text), EXPECTED if expected else SENT)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the numbers, texts and other scalars of a value."""
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, Approximately):
        value = [value.expected]
    elif isinstance(value, DataObject):
        value = [field for _, field in value.fields]
    if isinstance(value, list | tuple | frozenset):
        for member in value:
            yield from leaves(member)
    else:
        yield value


def holds(relation: str, value: str, expected: str) -> bool:
    """Return whether an encoded value has a relation (one of RELATIONS, or `not` one) to an encoded expected value.

    False if the relation is undefined for them, since a solution chose the value. `Incomparable` if a value is an
    object of another type, or too long for a pattern.
    """
    try:
        bare = relation.removeprefix("not ")
        return RELATIONS[bare](read(value), read(expected, expected=True)) is (bare == relation)
    except EqualToAnything:
        return False
    except Incomparable:
        raise
    # Every exception: code under test chooses the value, down to its bytes.
    except Exception:
        return False


def format_value(text: str) -> str:
    """Return the repr of an encoded value, shortened; the text itself if it cannot be decoded."""
    try:
        formatted = repr(read(text, expected=True))
    # Every exception: the code under test chooses the value.
    except Exception:
        formatted = text
    return formatted if len(formatted) <= LONGEST_FORMATTED else f"{formatted[:LONGEST_FORMATTED]}..."


LONGEST_FORMATTED = 80
LONGEST_SEARCHED = 4000
"""Limit on characters of a text that a pattern is searched in."""
SEARCH_S = 5.0
"""Time limit for a pattern with repetition: on a text that code under test chooses it may take years."""
SEARCH = "import json, re, sys; name, *args = json.load(sys.stdin); print(int(getattr(re, name)(*args) is not None))"


def has_match(
    function: str, pattern: str | bytes, text: str | bytes, flags: int = 0, limit_s: float = SEARCH_S
) -> bool:
    """Return whether a pattern matches; a pattern with repetition runs in a process of its own, with a time limit."""
    if isinstance(pattern, bytes) or isinstance(text, bytes) or not set(pattern) & set("*+{"):
        return getattr(re, function)(pattern, text, flags) is not None
    command = [sys.executable, "-I", "-S", "-c", SEARCH]
    request = json.dumps([function, pattern, text, int(flags)])
    try:
        completed = subprocess.run(command, input=request, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise Incomparable(Sentence("envs.repo.pattern-too-slow")) from None
    return completed.stdout.strip() == "1"


def _pattern_relation(function: str) -> Callable[[Any, Any], bool]:
    def matches(value: Any, expected: Any) -> bool:
        if len(value) > LONGEST_SEARCHED:
            raise Incomparable(Sentence("envs.repo.text-too-long"))
        pattern, *flags = expected
        pattern, *flags = pattern if isinstance(pattern, tuple) else (pattern, *flags)
        return has_match(function, pattern, value, flags[0] if flags else 0)

    return matches


_search = _pattern_relation("search")


def _exception_matches(value: Any, expected: Any) -> bool:
    """Return whether an exception or warning, as (class, text), has one of the classes and matches the pattern."""
    (name, text), (classes, pattern) = value, expected
    return _derives(name, classes) and (pattern is None or _search(text, (pattern,)))


def _derives(name: ClassName, classes: Any) -> bool:
    expected_classes = classes if isinstance(classes, tuple) else (classes,)
    return any(
        _derives(name, expected) if isinstance(expected, tuple) else expected.bases[0] in name.bases
        for expected in expected_classes
    )


def _same_elements(value: Any, expected: Any) -> bool:
    remaining = list(expected[0])
    for element in value:
        remaining.remove(element)
    return not remaining


def _almost(value: Any, expected: Any) -> bool:
    number, places, delta = expected
    return bool(value == number or (abs(value - number) <= delta if delta else round(abs(value - number), places) == 0))


RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    # The expected value first: it may equal many values.
    "==": lambda value, expected: bool(expected == value),
    "!=": lambda value, expected: bool(expected != value),
    # Among decoded values only None and booleans have an identity.
    "is": lambda value, expected: type(value) in (bool, type(None)) and value is expected,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, expected: value in expected,
    "has": lambda value, expected: expected in value,
    "true": lambda value, _: bool(value),
    "startswith": lambda value, expected: bool(value.startswith(expected)),
    "endswith": lambda value, expected: bool(value.endswith(expected)),
    "re.search": _search,
    "re.match": _pattern_relation("match"),
    "re.fullmatch": _pattern_relation("fullmatch"),
    "isclose": lambda value, expected: math.isclose(value, expected[0], rel_tol=expected[1], abs_tol=expected[2]),
    "within <": lambda value, expected: bool(abs(value - expected[0]) < expected[1]),
    "within <=": lambda value, expected: bool(abs(value - expected[0]) <= expected[1]),
    "almost": _almost,
    "same elements": _same_elements,
    "subclass of": _derives,
    "caught": _exception_matches,
    "warned": lambda value, expected: any(_exception_matches(warning, expected) for warning in value),
}
"""Relation -> function that returns whether a value has it to an expected value."""
