"""JSON of others: the depth of a text, whatever stands in its strings, and numbers that are kept through orjson."""

import json
import math

import orjson
import pytest

from composer_stages.json_text import MOST_LEVELS, TooDeep, changed_numbers, depth, exact, loads, restored
from composer_stages.runs import store


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (nested(MOST_LEVELS + 1), MOST_LEVELS + 1),
        ('{"a":' * 300 + "1" + "}" * 300, 300),
        ("[" * 5_000, 5_000),
        (json.dumps([{"a": '"[{\\', "[{": "\\", "b": [1]}] * 300), 3),
        (json.dumps(["\\\\[" * 500, '\\"[' * 500]), 1),
        ("[{}]\n" * 300, 2),
        (json.dumps("\ud800" + "[" * 300, ensure_ascii=False), 0),
    ],
)
def test_levels_are_counted_outside_of_strings(text: str, levels: int) -> None:
    assert depth(text) == levels
    assert depth(text.encode("utf-8", "surrogatepass")) == levels
    if text.isascii():
        assert depth(text.encode("utf-16")) == depth(text.encode("utf-32")) == levels


def test_loads_refuses_deep_nesting() -> None:
    assert loads(nested(MOST_LEVELS)) == json.loads(nested(MOST_LEVELS))
    with pytest.raises(TooDeep, match=r"20,000 levels deep, and at most 200 are read"):
        loads(nested(20_000))


CHANGED = [math.inf, -math.inf, 2**64, -(2**63) - 1, 10**4000]
LIKE_NUMBERS = [{"$number": "nan"}, {"$number": 1, "$$number": {"$number": math.inf}}, {"a": [{"$number": "x"}]}]


@pytest.mark.parametrize("value", [*CHANGED, *LIKE_NUMBERS, {"a": [1, 10**30, {"b": -math.inf}]}])
def test_exact_keeps_large_numbers(value: object) -> None:
    kept = orjson.loads(store.encode(exact(value)))
    assert restored(kept) == value and not [*changed_numbers(kept)]


def test_exact_keeps_nan_and_leaves_plain_values() -> None:
    (found,) = restored(orjson.loads(store.encode(exact([math.nan]))))
    assert found != found
    plain = {"a": [None, True, -(2**63), 2**64 - 1, 1.5, "nan", {"$set": {"$number_of": 1}}]}
    assert exact(plain) == restored(plain) == plain and [*changed_numbers(plain)] == []
    assert [*changed_numbers({"a": (1, [10**30]), "b": math.inf})] == [10**30, math.inf]
