"""Values of a test process, compared outside: what holds, and what no value that was sent can claim."""

import math
import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, make_dataclass
from datetime import date, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from composer_stages.envs.repo import values
from composer_stages.envs.repo.guest.composer_values import encode_value

Point = namedtuple("Point", "x y")


@dataclass
class Pair:
    one: int
    other: str
    note: str = field(default="", compare=False)


Level = IntEnum("Level", "low high")


class Agreeing(str):
    """Equal to everything, and says so."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "'right'"


class Same:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Between:
    """Less and greater than everything."""

    def __lt__(self, other: object) -> bool:
        return True

    __gt__ = __lt__


def holds(relation: str, value: Any, expected: Any) -> bool:
    return values.holds(relation, encode_value(value), encode_value(expected))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -7, 10**40, 2.5, math.inf, "a\ud800é", b"x", [1, (2, "b")], {1: {"a": None}}, {1, (2,)}),
        *(Decimal("1.50"), Fraction(1, 3), date(2024, 2, 29), timedelta(1, 2, 3), Path("a/b"), UUID(int=5), 1 + 2j),
    ],
    ids=lambda value: type(value).__name__,  # a set prints itself in another order in each process
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = values.read(encode_value(value))
    assert back == value and (type(back) is type(value) or isinstance(value, set | Path))
    assert holds("==", value, value) and not holds("==", value, "other")


@pytest.mark.parametrize(
    ("relation", "value", "expected"),
    [
        ("==", True, 1),
        ("==", 2.0, 2),
        ("==", OrderedDict(a=1), {"a": 1}),
        ("==", Point(1, 2), (1, 2)),
        ("==", [Pair(1, "a", "x")], [Pair(1, "a")]),
        ("==", Level.high, 2),
        ("==", {"a": 1}.keys(), {"a"}),
        ("==", [1.0000001, {"a": 3}], [pytest.approx(1), {"a": pytest.approx(3)}]),
        ("==", {"a": 0.3, "b": 1}, pytest.approx({"a": 0.1 + 0.2, "b": 1})),
        ("==", math.nan, pytest.approx(math.nan, nan_ok=True)),
        ("==", ["a", 5], ["a", mock.ANY]),
        ("is", None, None),
        ("not is", 1, True),
        ("has", "a needle", "needle"),
        ("not in", 3, (1, 2)),
        ("startswith", "abc", ("x", "ab")),
        ("re.search", "xabc", (re.compile("A", re.IGNORECASE),)),
        ("re.match", "abc", ("ab", 2)),
        ("almost", 1.00000001, (1, 7, None)),
        ("almost", 1.4, (1, 7, 0.5)),
        ("within <", 1.05, (1, 0.1)),
        ("same elements", ["b", "a", "b"], (["b", "b", "a"],)),
        ("subclass of", bool, (str, (int, float))),
        ("caught", (FileNotFoundError, "no a.txt"), (OSError, r"\.txt$")),
        ("warned", [(UserWarning, "x"), (FutureWarning, "y")], (FutureWarning, None)),
    ],
)
def test_relations_hold(relation: str, value: Any, expected: Any) -> None:
    assert holds(relation, value, expected)
    assert not holds(
        relation.removeprefix("not ") if relation.startswith("not ") else f"not {relation}", value, expected
    )


@pytest.mark.parametrize(
    ("relation", "value", "expected"),
    [
        ("==", Agreeing("wrong"), "right"),
        ("!=", Same(), "right"),
        ("==", [Same()], [1]),
        ("<", Between(), 5),
        ("==", mock.ANY, "right"),
        ("==", pytest.approx(1, abs=9), 5),
        ("is", 1, True),
        ("==", Pair(1, "b"), Pair(1, "a")),
        ("==", make_dataclass("Other", ["one", "other"])(1, "a"), Pair(1, "a")),
        ("<", "a", 3),
        ("not <", "a", 3),
        ("not has", 5, "a"),
        ("==", 1.1, pytest.approx(1)),
        ("==", math.inf, pytest.approx(1)),
        ("==", "1", pytest.approx(1)),
        ("almost", 1.1, (1, 7, None)),
        ("same elements", ["a", "a"], (["a"],)),
        ("same elements", ["a"], (["a", "a"],)),
        ("caught", None, (ValueError, None)),
        ("caught", (type("ValueError", (Exception,), {}), ""), (ValueError, None)),
        ("caught", (ValueError, "wrong"), (ValueError, "right")),
        ("subclass of", type("int", (), {}), int),
    ],
)
def test_relations_that_do_not_hold(relation: str, value: Any, expected: Any) -> None:
    assert not holds(relation, value, expected)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", '["any"]', '["approx", 5, 5, true]', '["same", "x"]', "1e999", '["x", "date", ["s", "00"]]'),
        *('["d", [["l"], 1]]', "[" * 5000, '["f", 1]', '["x", "eval", ["s", "31"]]', '{"a": 1}', '["k"]', "9" * 5000),
        '["x", "Fraction", ["s", "316539393939393939"]]',
    ],
)
def test_malformed_texts_are_never_right(text: str) -> None:
    for expected in (5, "right", None, [], date(2024, 1, 1)):
        assert not values.holds("==", text, encode_value(expected))


@pytest.mark.parametrize(
    ("relation", "value", "expected"),
    [
        ("==", object(), "right"),
        ("!=", [object()], [5]),
        ("==", re.match("a", "a"), "right"),
        ("re.search", "a" * 5000, ("a",)),
    ],
)
def test_incomparable_values_are_not_wrong(relation: str, value: Any, expected: Any) -> None:
    with pytest.raises(values.Incomparable):
        holds(relation, value, expected)


def test_a_pattern_that_takes_too_long_is_incomparable() -> None:
    with pytest.raises(values.Incomparable):
        values.has_match("search", r"^(\w+\s?)+$", "a" * 40 + "!", limit_s=0.2)


def test_recursive_and_large_values_are_sent_as_objects() -> None:
    ring: list[Any] = []
    ring.append(ring)
    wide: list[Any] = [1]
    for _ in range(60):
        wide = [wide, wide]
    for value in (ring, wide, "x" * 10**6, list(range(10**5))):
        text = encode_value(value)
        assert len(text) < 100
        with pytest.raises(values.Incomparable):
            values.holds("==", text, "5")
