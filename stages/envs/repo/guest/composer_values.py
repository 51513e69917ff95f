"""Encode a value as text that stages/envs/repo/values.py decodes, in the process of the code under test.

It runs inside the sandbox under Python 3.6 or later. Code under test may replace any of it and send any value, without
gain: the expected values are not in this process.
"""

import builtins
import json
import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LONGEST_ANSWER = 40000
"""Limit on characters of an encoded value; a longer one is sent as an object that cannot be compared."""
MOST_ANSWERS = 500
"""Limit on answers of one test; a test that reaches it is not asked."""
MOST_PARTS = 5000
"""Limit on parts of one value: objects that hold each other have many more parts than memory."""


def encode_value(value: "Any") -> str:
    """Return a value as tagged JSON for stages/envs/repo/values.py; an object of another type by the type's name."""
    try:
        text = json.dumps(tagged(value, [MOST_PARTS]))
    except NotPlain as error:
        return json.dumps(["same" if isinstance(error, AgreesWithAll) else "o", str(error)])
    except Exception:  # a subclass may fail in any way
        return '["o", "an object that fails"]'
    return text if len(text) <= LONGEST_ANSWER else '["o", "a long value"]'


class NotPlain(Exception):
    """A value is, or holds, an object of another type."""


class AgreesWithAll(NotPlain):
    """The object says that it is equal to anything, or less and greater."""


def tagged(value: "Any", room: "list[int]") -> "Any":
    """Return a value as JSON with tags, a subclass as its built-in type; `NotPlain` for any other type."""
    room[0] -= 1
    if room[0] < 0:
        raise NotPlain("a large value")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, int):
        return int.__add__(value, 0)
    if issubclass(kind, float):
        return ["f", float.__repr__(value)]
    if issubclass(kind, str):
        return ["s", str.encode(value, "utf-8", "surrogatepass").hex()]
    if issubclass(kind, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if issubclass(kind, (list, tuple)):
        is_list = issubclass(kind, list)
        items: Any = (list if is_list else tuple).__iter__(value)
        return ["l" if is_list else "t"] + [tagged(item, room) for item in items]
    if issubclass(kind, (set, frozenset)):
        return ["e"] + [tagged(item, room) for item in (set if issubclass(kind, set) else frozenset).__iter__(value)]
    if kind is type({}.keys()):
        return ["e"] + [tagged(item, room) for item in value]
    if issubclass(kind, dict):
        return ["d"] + [[tagged(item, room) for item in pair] for pair in dict.items(value)]
    if issubclass(kind, type):
        # Not by its name: a class of the code under test may be called ValueError.
        return ["k"] + [("" if id(base) in BUILT_IN else "~") + base.__name__ for base in type.mro(value)]
    name = kind.__name__
    if name in CONSTRUCTOR_ARGUMENTS:
        return ["x", name.replace("PurePosix", "").replace("Posix", "")] + [
            tagged(argument, room) for argument in CONSTRUCTOR_ARGUMENTS[name](value)
        ]
    if name == "Pattern":
        return ["t", tagged(value.pattern, room), value.flags]
    if name == "_ANY":
        return ["any"]
    if name.startswith("Approx"):
        return approximate(value, room)
    fields = getattr(kind, "__dataclass_fields__", None)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return tagged(value.item(), room)
    if fields:
        pairs = [
            [tagged(field, room), tagged(getattr(value, field), room)] for field in fields if fields[field].compare
        ]
        return ["c", name, *pairs]
    raise (AgreesWithAll if agrees_with_all(value) else NotPlain)(name)


def agrees_with_all(value: "Any") -> bool:
    """Return whether an object equals random values, or is both less and greater than one."""
    number = int.from_bytes(os.urandom(6), "big")
    for stranger in (object(), number, str(number)):
        with suppress(Exception):  # no order, or no truth, as of an array
            if value == stranger or (value < stranger and value > stranger):
                return True
    return False


def approximate(value: "Any", room: "list[int]") -> "Any":
    """Return an object of pytest.approx as JSON with tags."""
    expected = value.expected
    if isinstance(expected, dict):
        return ["d"] + [[tagged(key, room), tagged(value._approx_scalar(item), room)] for key, item in expected.items()]
    if isinstance(expected, (list, tuple)):
        items = [tagged(value._approx_scalar(item), room) for item in expected]
        return ["l" if isinstance(expected, list) else "t", *items]
    # No number is near to NaN.
    tolerance = value.tolerance if expected == expected else 0
    return ["approx", tagged(expected, room), tagged(tolerance, room), bool(value.nan_ok)]


BUILT_IN = frozenset(id(builtin) for builtin in vars(builtins).values() if isinstance(builtin, type))
CONSTRUCTOR_ARGUMENTS: "dict[str, Callable[[Any], list[Any]]]" = {
    "Decimal": lambda value: [str(value)],
    "Fraction": lambda value: [value.numerator, value.denominator],
    "UUID": lambda value: [str(value)],
    "PosixPath": lambda value: [str(value)],
    "PurePosixPath": lambda value: [str(value)],
    "date": lambda value: [value.isoformat()],
    "datetime": lambda value: [value.isoformat()],
    "time": lambda value: [value.isoformat()],
    "timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "complex": lambda value: [value.real, value.imag],
}
"""Type of the standard library, by name -> arguments of its constructor."""
