"""Which values, exceptions and texts of a program count as those that are expected: one rule for all environments.

Values are equal as Python's `==` decides, but for these: True and False equal only themselves; NaN equals NaN; a float
is expected within a tolerance, beside an integer within that of 1. A Counter is a dict then, a named tuple a tuple,
Fraction(1, 2) is 0.5, and a range is no list.
"""

import builtins
import cmath
import math
import re
import sys
from collections import deque
from collections.abc import Collection, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Tolerances of an expected float: relative to it, and near 0, where the first one is none (as of pytest.approx)."""
PRINTED = 1e-6
"""Tolerance of printed numbers with a decimal point, relative to those above 1: that of online judges."""
Number = int | float | complex | Fraction | Decimal
DECIMAL_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?!\w|\.\d)")


def equal(value: Any, expected: Any, *, json: bool = False) -> bool:
    """Return whether a value equals the expected one; where that was written in JSON, its arrays stand for tuples, too.

    The value may be any that `guest.values.decoded` returns.
    """
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, Number):
        return isinstance(value, Number) and _is_close(value, expected)
    for kind in (tuple, list, deque):
        if isinstance(expected, kind):
            if not isinstance(value, (list, tuple) if json and kind is list else kind) or len(value) != len(expected):
                return False
            return all(equal(item, target, json=json) for item, target in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        by_key = {_key(key): item for key, item in value.items()}
        return all(_key(key) in by_key and equal(by_key[_key(key)], item, json=json) for key, item in expected.items())
    if isinstance(expected, Set):
        return isinstance(value, Set) and _is_same_set(value, expected)
    return bool(value == expected)


def _key(key: Any) -> Any:
    """Return what stands for a key: 1 and 1.0 are one key, 1 and True are two, and NaN is found."""
    if isinstance(key, bool) or key != key:
        return type(key), str(key)
    if isinstance(key, tuple):
        return tuple, tuple(map(_key, key))
    return key


def _is_same_set(value: Collection[Any], expected: Collection[Any]) -> bool:
    if len(value) != len(expected):
        return False
    if set(map(_key, value)) == set(map(_key, expected)):
        return True
    numbers = all(type(item) in (int, float) for item in (*value, *expected))
    return numbers and all(map(equal, sorted(value), sorted(expected)))


def _is_close(value: Any, expected: Any) -> bool:
    if value == expected or (value != value and expected != expected):
        return True
    try:
        if isinstance(value, complex) or isinstance(expected, complex):
            return cmath.isclose(complex(value), complex(expected), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        if isinstance(value, int) or isinstance(expected, int):
            # Exactly: as floats, large integers that differ are equal. No share of a large integer is near to it.
            return abs(Fraction(value) - Fraction(expected)) <= max(ABSOLUTE, RELATIVE * min(1, abs(expected)))
        # Of infinity everything would be within a share.
        return math.isfinite(expected) and math.isclose(value, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except (ArithmeticError, ValueError, TypeError):  # of values beyond floats, NaN, and mixed types
        pass
    return False


def is_raised(classes: Collection[str], expected: str) -> bool:
    """Return whether an exception is of the expected class, or of one derived from it.

    classes: as `guest.values.class_names` returns them. A built-in exception is none that is only called so; others
    are named with or without their module.
    """
    if isinstance(built_in := getattr(builtins, expected, None), type):
        return built_in.__name__ in classes  # IOError is OSError
    return any(name == expected or name.endswith(f".{expected}") for name in classes)


def equal_texts(text: str, expected: str, *, numbers: bool = True) -> bool:
    """Return whether a printed or written text is the expected one.

    Line ends, blanks at the ends of lines and empty lines at the end do not count. With `numbers` a number with a
    decimal point or an exponent, where both texts have a number, is compared as one, within `PRINTED`.
    """
    lines, expected_lines = _lines(text), _lines(expected)
    if lines == expected_lines:
        return True
    return numbers and len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _is_same_line(line: str, expected: str) -> bool:
    # Numbers stand at the odd places.
    parts, expected_parts = DECIMAL_NUMBER.split(line), DECIMAL_NUMBER.split(expected)
    return len(parts) == len(expected_parts) and all(
        part == target or (number % 2 == 1 and _is_same_number(part, target))
        for number, (part, target) in enumerate(zip(parts, expected_parts, strict=True))
    )


def _is_same_number(text: str, expected: str) -> bool:
    if not re.search(r"[.eE]", expected):
        return False
    return abs(float(text) - float(expected)) <= PRINTED * max(1.0, abs(float(expected)))


def formatted(value: Any) -> str:
    """Return the repr of a value; a description where it has more digits than Python writes."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} of more than {sys.get_int_max_str_digits()} digits>"
