"""The depth of JSON text: what is measured, whatever stands in its strings, and what is refused unread."""

import json

import pytest

from stages.json_text import MOST_LEVELS, TooDeep, depth, loads


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


def test_what_is_nested_too_deeply_is_refused_with_its_depth() -> None:
    assert loads(nested(MOST_LEVELS)) == json.loads(nested(MOST_LEVELS))
    with pytest.raises(TooDeep, match=r"20,000 levels deep, and at most 200 are read"):
        loads(nested(20_000))
