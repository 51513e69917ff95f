"""What counts as the expected value or text."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from composer_stages.sandbox.equality import equal, equal_texts

NAN, INF = math.nan, math.inf
EQUAL: list[tuple[Any, Any]] = [
    *((3, 3.0), (3.0, 3), (5.551115123125783e-17, 0.0), (5e-17, 0), (0.1 + 0.2, 0.3), (0.3, 0.1 + 0.2), (NAN, NAN)),
    *((-0.0, 0.0), (INF, INF), (10**30, 10**30), (10**400, 10**400), (1e22, 10**22), (999999.9999999999, 10**6)),
    *((Fraction(1, 2), 0.5), (Fraction(4, 2), 2), (Fraction(1, 3), 1 / 3), (Decimal("0.1"), 0.1), (1 + 1e-13j, 1.0)),
    *(({1: 2}, {1.0: 2.0}), ({NAN: 1}, {NAN: 1}), ({"b": NAN, "a": 1}, {"a": 1, "b": NAN}), ({0.1 + 0.2}, {0.3})),
    *(({1: {2}}, {1: frozenset({2})}), ([1, (2.0, None)], [1, (2, None)]), ("", ""), ({(1, NAN)}, {(1, NAN)})),
]
UNEQUAL: list[tuple[Any, Any]] = [
    *((1, True), (True, 1), (False, 0.0), (None, NAN), (NAN, 0.0), (NAN, INF), (INF, -INF), (10**400, INF), (None, 0)),
    *((1e-7, 0.0), (1e-9, 0), (1.001, 1.0), (2**53 + 1, float(2**53)), (float(2**53), 2**53 + 1), (1e22, 10**22 + 1)),
    *(
        (3999999999.5, 4 * 10**9),
        (10**30, 10**30 + 1),
        (Decimal("1e9999"), INF),
        (Fraction(1, 3), 0.3333),
        ("1", 1),
        (1, "1"),
        ("a", b"a"),
    ),
    *(((1,), [1]), ([1], (1,)), (range(2), [0, 1]), ({1}, [1]), ({1: 2}, {True: 2}), ({1: 2}, {"1": 2}), ({1}, {True})),
    *(([1], [1, 2]), ([True], [1]), ({"a": 1}, {"a": True}), ({"a": 1}, {"a": 1, "b": 2}), ({1, 2}, {1, 3}), ([], ())),
]


@pytest.mark.parametrize(("pairs", "right"), [(EQUAL, True), (UNEQUAL, False)])
def test_values_are_equal_as_python_decides_within_tolerance(pairs: list[tuple[Any, Any]], right: bool) -> None:
    assert [pair for pair in pairs if equal(*pair) is not right] == []
    assert [pair for pair in pairs if equal([{"a": pair[0]}], [{"a": pair[1]}]) is not right] == []


def test_arrays_of_json_stand_for_tuples() -> None:
    assert equal(({"a": (1,)}, [2]), [{"a": [1]}, [2]], json=True)
    assert not equal([1], (1,), json=True) and not equal({1}, [1], json=True)


TEXTS: list[tuple[str, str, bool]] = [
    *(
        ("3\r\n4 \n\n", "3\n4", True),
        ("3\n4", "3 4", False),
        ("a  b", "a b", False),
        (" 3", "3", False),
        ("", "\n", True),
    ),
    *(("0.3333333333333333", "0.333333333333", True), ("0.3333", "0.333333333333", False), (".50", "0.5", True)),
    *(("x=1e-7, y", "x=0.0, y", True), ("1.5e3", "1500.0", True), ("2", "2.0", True), ("2.0", "2", False)),
    *(
        ("1000001.5", "1000000.5", True),
        ("1000002.5", "1000000.5", False),
        ("-0.5", "0.5", False),
        ("1.2.4", "1.2.3", False),
    ),
    *(("nan", "0.5", False), ("10.0.0.1", "10.0.0.2", False), ("v1.50", "v1.5", False), ("0.5\n", "0.5\n1", False)),
]


@pytest.mark.parametrize(("text", "expected", "right"), TEXTS)
def test_texts_are_equal_but_for_ends_of_lines_and_digits(text: str, expected: str, right: bool) -> None:
    assert equal_texts(text, expected) is right
    is_written_alike = text.split() == expected.split()
    assert equal_texts(text, expected, numbers=False) is (right and is_written_alike)
