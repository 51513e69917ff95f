import pytest

from composer_stages.envs.code.assertions import CannotAsk, canonical_text, read_assertions, restore_value
from composer_stages.sandbox import Answer


def holds(text: str, *returned: object) -> bool:
    """Whether the one assertion of a test holds for what its calls returned."""
    [assertion] = read_assertions(text, {"f"})
    return assertion.holds([Answer(value=value) for value in returned])


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("assert f(1) == 2", 2, 3),
        ("assert 2 == f(1)", 2, 3),
        ("assert f(1)", 1, 0),
        ("assert not f(1)", [], [0]),
        ("assert f(1) is None", None, 0),
        ("assert f(1) is True", True, 1),
        ("assert f(1) in (2, 3)", 3, 4),
        ("assert abs(f(1) - 0.5) < 1e-6", 0.5, 0.6),
        ("assert math.isclose(f(1), 0.5, rel_tol=0.001)", 0.5, 0.6),
        ("assert set(f(1)) == set([1, 2])", [2, 1, 1], [1]),
        ("assert sorted(f(1)) == [1, 2]", (2, 1), [2, 2]),
        ("assert tuple(f(1)) == (1, 2), 'said'", [1, 2], [2, 1]),
        ("assert f(1)[0] == 2 and len(f(1)) == 1", None, None),
        ("wanted = [1, 1 + 1]\nassert f(1) == wanted", [1, 2], [1]),
        ("def check(candidate):\n    assert candidate(x=1) == {'a': 2.5}", {"a": 2.5}, {"a": 2}),
    ],
)
def test_forms(text: str, right: object, wrong: object) -> None:
    if right is None and wrong is None:
        assert holds(text, [2], [2]) and not holds(text, [2], [2, 2])
    else:
        assert holds(text, right) and not holds(text, wrong)


def test_equality_is_that_of_python() -> None:
    """1 == 1.0 == True, a tuple is no list, and NaN equals nothing."""
    assert holds("assert f() == 1", 1.0) and holds("assert f() == 1", True)
    assert not holds("assert f() == [1]", (1,))
    assert not holds("assert f() == math.nan", float("nan"))
    assert holds("assert f() == {1, 2}", {"__set__": [2, 1]})


def test_an_object_of_another_type_is_true_and_equals_nothing() -> None:
    foreign = {"__type__": "Evil"}
    assert holds("assert f()", foreign)
    [assertion] = read_assertions("assert not f(1)", {"f"})
    assert not assertion.holds([Answer(error="ValueError")]), "a call that raised fails its assertion"
    for text in ("assert f() == 1", "assert len(f()) == 1", "assert f() == {'__type__': 'Evil'}", "assert f() < 1"):
        assert not holds(text, foreign)
    assert canonical_text(restore_value({"__bytes__": 10**12})) == "<__bytes__>"


def test_loops_over_known_values_are_followed() -> None:
    found = read_assertions(
        "for i, (given, out) in enumerate(zip([[1], [2]], [3, 4])):\n    assert f(*given) == out", {"f"}
    )
    assert [one.arguments for one in found] == [(((1,), {}),), (((2,), {}),)]
    assert [one.holds([Answer(value=4)]) for one in found] == [False, True]


EVALPLUS = """
def assertion(out, exp, atol):
    if not out == exp: assert np.allclose(out, exp, rtol=1e-07, atol=atol)

inputs = [[1]]
results = [0.1]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(f(*inp), exp, 0)
"""


def test_evalplus_compares_floats_with_a_tolerance() -> None:
    assert holds(EVALPLUS, 0.1 + 1e-7) and not holds(EVALPLUS, 0.2) and not holds(EVALPLUS, "0.1")


@pytest.mark.parametrize(
    "text",
    [
        "assert f(Counter([1])) == 1",
        "assert f(lambda x: x) == 1",
        "assert f(f(1)) == 1",
        "assert f(1).upper() == 'A'",
        "assert f(__import__('os').getpid()) == 1",
        "assert f(().__class__.__bases__) == 1",
        "assert f(1) is 5",
        "assert f(10 ** 10 ** 10) == 1",
        "assert f([0] * 10 ** 9) == 1",
        "assert f(1 / 0) == 1",
        "import random\nx = random.random()\nassert f(x) == 1",
        "sorted = 3\nassert sorted(f(1)) == [1]",
        "while True:\n    assert f(1)",
        "for i in range(10 ** 5):\n    for j in range(10 ** 5):\n        print(i)\nassert f(1)",
        "assert False\nassert f(1)",
        "assert g(1) == 1",
        "x = 3",
        "assert f(",
        f"assert f({'[' * 500}{']' * 500}) == 1",
    ],
)
def test_what_cannot_be_asked_is_refused(text: str) -> None:
    with pytest.raises(CannotAsk):
        read_assertions(text, {"f"})
