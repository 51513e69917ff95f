"""Contradictions of tests."""

import ast
import textwrap

import pytest

from stages.envs.feature_deletion.contradictions import find_contradictions, find_test
from stages.envs.feature_deletion.definitions import apply_edits

CASES = {
    "assert f(1) == 2": "assert f(1) == 3",
    "assert f(1) == [1, 'a']": "assert f(1) == [2, 'a']",
    "assert {'a': True} == f(1)": "assert {'a~': True} == f(1)",
    "assert f(x) == y": "assert f(x) == ((y),)",
    "assert not f(1)": "assert (f(1))",
    "assert f(1)": "assert not (f(1))",
    "assert f(1) in g()": "assert not (f(1) in g())",
    "self.assertEqual(f(1), b'x')": "self.assertEqual(f(1), b'x~')",
    "assert_equal(f(1), 2.5)": "assert_equal(f(1), 3.5)",
    "self.assertTrue(f(1))": "self.assertFalse(f(1))",
    "self.assertRaises(ValueError, f, 1)": "self.assertRaises(BufferError, f, 1)",
    "check(f, 'ä', 2)": "check(f, 'ä', 3)",
}


def first(statement: str) -> str:
    """The test's statement with its surest contradiction."""
    text = f"def test_it():\n    {statement}\n"
    return apply_edits(text, [find_contradictions("t.py", text, ("test_it",))[0].edit]).splitlines()[1].strip()


@pytest.mark.parametrize("statement", CASES)
def test_one_expectation_changes(statement: str) -> None:
    assert first(statement) == CASES[statement]


def test_only_what_is_surely_expected_is_exclusive() -> None:
    def exclusive(statement: str) -> bool:
        return find_contradictions("t.py", f"def test_it():\n    {statement}\n", ("test_it",))[0].exclusive

    assert exclusive("assert f(1) == 2") and exclusive("self.assertRaises(ValueError, f)")
    assert not exclusive("check_close(f(1), 2, 1e-9)")


def test_a_raises_block_wants_another_exception() -> None:
    assert first("with pytest.raises(KeyError): f(1)") == "with pytest.raises(BufferError): f(1)"


def test_all_of_them_parse_and_differ() -> None:
    text = "def test_it():\n" + "".join(f"    {statement}\n" for statement in CASES)
    found = [apply_edits(text, [one.edit]) for one in find_contradictions("t.py", text, ("test_it",))]
    assert len(set(found)) == len(found) > 4 and text not in found
    assert all(ast.parse(one) for one in found)


def test_an_always_equal_object_passes_an_equality_and_its_contradiction() -> None:
    class Always:
        def __eq__(self, other: object) -> bool:
            return True

    for statement in ("assert f(1) == 2", "assert f(x) == y"):
        exec(first(statement), {"f": lambda _: Always(), "x": 1, "y": 2})


def test_the_quote_is_the_whole_test_with_its_decorators() -> None:
    text = textwrap.dedent(
        """\
        class TestA:
            @mark
            def test_it(self):
                assert f(1) == 2

            def test_other(self):
                pass
        """
    )
    quote = find_contradictions("t.py", text, ("TestA", "test_it"))[0].quote
    assert quote == "@mark\ndef test_it(self):\n    assert f(1) == 2"


def test_an_inherited_test_is_found_by_its_name() -> None:
    text = "class Mixin:\n    def test_it(self):\n        assert f(1) == 2\n"
    assert find_contradictions("t.py", text, ("TestA", "test_it"), inherited=True)
    assert find_test(text + "class Other:\n    def test_it(self): pass\n", ("test_it",)) is None


def test_a_test_without_expectations_cannot_be_contradicted() -> None:
    assert find_contradictions("t.py", "def test_it():\n    f(1)\n", ("test_it",)) == []
