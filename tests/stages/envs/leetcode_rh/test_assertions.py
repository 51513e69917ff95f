import math

import pytest

from stages.envs.leetcode_rh.assertions import read


def test_calls_and_expected_values() -> None:
    text = "def check(candidate):\n    assert candidate(a = [1, -2], b = 'x') == 2.0\n    assert candidate(3) == inf"
    first, second = read([text]) or []
    assert first.arguments == ("plain", (), {"a": ("plain", [1, -2]), "b": ("plain", "x")})
    assert second.arguments == ("plain", (("plain", 3),), {}) and second.expected == ("plain", math.inf)


def test_statements_of_any_callee() -> None:
    found = read(["assert Solution().f(n = 1) == -inf", "assert Solution().f(n = 2) == [None, True]"])
    assert found is not None and [one.expected[1] for one in found] == [-math.inf, [None, True]]


def test_nodes() -> None:
    one, two = (read(["assert is_same_list(candidate(head = list_node([1, 2])), list_node([2]))"]) or []) + (
        read(["assert is_same_tree(candidate(root = tree_node([1])), tree_node([1, None, 2, None]))"]) or []
    )
    assert one.arguments == ("list_node", (), {"head": ("list_node", [1, 2])})
    assert one.holds([2]) and not one.holds([2, 1])
    assert two.holds([1, None, 2]) and not two.holds([1, 2])


@pytest.mark.parametrize(
    ("returned", "holds"), [([2], True), ([2.0], True), ((2,), False), ([2, 2], False), ({"__type__": "Yes"}, False)]
)
def test_equality_is_that_of_python(returned: object, holds: bool) -> None:
    assert (read(["assert candidate() == [2]"]) or [])[0].holds(returned) is holds


@pytest.mark.parametrize(
    "statements",
    [
        [],
        ["assert candidate(1)"],
        ["assert candidate(1) != 2"],
        ["assert candidate(1) == open('x')"],
        ["assert candidate(**x) == 1"],
        ["assert is_same_tree(candidate(1), list_node([1]))"],
        ["x = candidate(1)"],
        ["assert candidate(1 == "],
        ["assert candidate(1) == 1", "print()"],
    ],
)
def test_what_cannot_be_read_is_not_half_read(statements: list[str]) -> None:
    assert read(statements) is None
