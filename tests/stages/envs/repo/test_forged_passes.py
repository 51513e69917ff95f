"""Mutated tests run as before, except those chosen to fail; a forged pass contradicts itself with them."""

import random
import re
from collections.abc import Callable

import pytest

from stages.envs.repo import trees
from stages.envs.repo.forged_passes import (
    TestLocation,
    defined_functions,
    function_name,
    is_forged,
    is_mutable,
    locate,
    mutate,
    mutated_runs,
)
from stages.envs.repo.grading import Statuses, TestLists

SOURCE = '''\
import unittest

seen = []


def test_plain():
    """What it is."""
    seen.append("plain")


@staticmethod
def test_early():
    if seen is not None:
        return
    seen.append("never")


def helper(): seen.append("helper")


class TestIt(unittest.TestCase):
\tdef test_nested(self):
\t\tdef inner():
\t\t\treturn 1
\t\twith self.assertRaises(ValueError):
\t\t\traise ValueError(
\t\t\t    inner())

\tclass TestInner:
\t\tasync def test_async(self):
\t\t\tseen.append("async")


def test_each():
    yield helper


def test_calls_another():
    test_early()
'''
FILES = {"t.py": SOURCE}
PLAIN, EARLY = TestLocation("t.py", (), "test_plain"), TestLocation("t.py", (), "test_early")
NESTED = TestLocation("t.py", ("TestIt",), "test_nested")


def world(mutated: set[TestLocation]) -> dict:
    names: dict = {}
    exec(mutate(FILES, mutated, random.Random(0))["t.py"], names)
    return names


def test_nothing_changes_where_nothing_is_mutated() -> None:
    names = world(set())
    names["test_plain"]()
    names["test_early"]()
    names["TestIt"]("test_nested").test_nested()
    assert names["seen"] == ["plain"]


def test_a_mutated_test_runs_through_and_fails_at_its_end_or_at_its_start_where_it_returns() -> None:
    names = world({PLAIN, EARLY, NESTED})
    for test in (names["test_plain"], names["test_early"], names["TestIt"]("test_nested").test_nested):
        with pytest.raises(AssertionError):
            test()
    assert names["seen"] == ["plain"]


def test_mutated_and_whole_differ_in_a_number_alone() -> None:
    one, other = (mutate(FILES, mutated, random.Random(7))["t.py"].split("\n") for mutated in (set(), {PLAIN}))
    assert one != other
    assert [re.sub(r"\d+", "0", line) for line in one] == [re.sub(r"\d+", "0", line) for line in other]


def test_what_cannot_be_mutated_alone_is_not() -> None:
    known = defined_functions(FILES)
    whole = {function.name for function, node in known.items() if is_mutable(function, node, FILES)}
    assert whole == {"test_plain", "test_nested", "test_async", "test_calls_another"}


def test_tests_are_found_by_the_names_of_pytest_and_of_unittest() -> None:
    known = defined_functions(FILES)
    assert locate("t.py::test_plain[a::b]", known) == PLAIN and function_name("t.py::test_plain[a::b]") == "test_plain"
    assert locate("t.py::TestIt::test_nested", known) == NESTED
    assert (
        locate("test_nested (t.TestIt)", known) == NESTED and function_name("test_nested (t.TestIt)") == "test_nested"
    )
    assert locate("test_plain", known) == PLAIN
    assert [locate(name, known) for name in ("u.py::test_plain", "test_nested (t.Other)", "It does", "test_none")] == [
        None
    ] * 4


LISTS = TestLists(("t.py::test_plain",), ("t.py::TestIt::test_nested",))
ALL = dict.fromkeys((*LISTS.fail_to_pass, *LISTS.pass_to_pass), "passed")
TREE = {"t.py": trees.TreeFile(SOURCE.encode())}


Answer = Callable[[set[str]], Statuses]


def right(mutated: set[str]) -> Statuses:
    return {name: "failed" if name in mutated else "passed" for name in ALL}


def by(candidate: Answer, reference: Answer = right) -> bool:
    """Whether a candidate is called forged whose runs give this answer to the tests that are mutated."""

    def rerun(files: trees.Changes, of_reference: bool) -> Statuses:
        mutated_file = files["t.py"]
        assert mutated_file is not None
        text = mutated_file.data.decode()
        mutated = {name for name, function in zip(ALL, (PLAIN, NESTED), strict=True) if fails(text, function)}
        return (reference if of_reference else candidate)(mutated)

    return is_forged(TREE, LISTS, ALL, rerun, reference=True)


def fails(text: str, function: TestLocation) -> bool:
    names: dict = {}
    exec(text, names)
    try:
        names["TestIt"]("test_nested").test_nested() if function.classes else names[function.name]()
    except AssertionError:
        return True
    return False


def test_one_function_that_has_to_pass_is_checked_whole_and_mutated() -> None:
    first, second = mutated_runs(TREE, LISTS, ALL)
    assert (first.must_fail, first.must_pass) == ({LISTS.pass_to_pass[0]}, {LISTS.fail_to_pass[0]})
    assert (second.must_fail, second.must_pass) == ({LISTS.fail_to_pass[0]}, {LISTS.pass_to_pass[0]})


def test_the_honest_is_believed_and_who_contradicts_himself_is_not() -> None:
    fixed = LISTS.fail_to_pass[0]
    assert not by(right)
    assert by(lambda mutated: ALL)
    assert by(lambda mutated: {})
    assert by(lambda mutated: {**right(mutated), fixed: "passed"})
    assert by(lambda mutated: {**right(mutated), fixed: "failed"})


def test_what_the_reference_solution_does_counts_against_nobody() -> None:
    lost = dict.fromkeys(ALL, "failed")
    assert not by(lambda mutated: lost, reference=lambda mutated: lost)
    assert by(lambda mutated: lost, reference=lambda mutated: {})


def test_a_failure_that_is_not_repeated_counts_against_nobody() -> None:
    runs = iter(range(100))
    assert not by(lambda mutated: {} if next(runs) == 0 else right(mutated))


@pytest.mark.parametrize("number", [0, 1])
def test_a_mutated_test_that_passes_once_is_enough(number: int) -> None:
    """A race that changes reports wins now and then, and what it has done once nothing honest does."""
    runs = iter(range(100))
    assert by(lambda mutated: ALL if next(runs) == number else right(mutated))
