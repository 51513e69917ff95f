"""One expected value of a test changes, and the test is quoted as it was."""

import textwrap

import pytest

from composer_stages.envs.feature_deletion.definitions import apply_edits
from composer_stages.envs.feature_deletion.twins import LONGEST_QUOTE, quoted_test

CASES = {
    "assert f(1) == 2": "assert f(1) == 3",
    "assert 'a' == f(1)": "assert 'a~' == f(1)",
    "assert f(1) == [True, 2]": "assert f(1) == [False, 2]",
    "self.assertEqual(f(1), b'x')": "self.assertEqual(f(1), b'x~')",
    "assert_equal(f(1), 2.5)": "assert_equal(f(1), 3.5)",
    "assert f(x) == y": "assert not (f(x) == y)",
    "assert not f(1)": "assert not (not f(1))",
    "assert f(1) == f'{x}'": "assert not (f(1) == f'{x}')",
    "f(1); assert f(2) == 3": "f(1); assert f(2) == 4",
}


@pytest.mark.parametrize("statement", CASES)
def test_contradiction_changes_one_expectation(statement: str) -> None:
    text = f"def test_it():\n    {statement}\n"
    found = quoted_test("t.py", text, ["test_it"])
    assert found and found.edit and apply_edits(text, [found.edit]).splitlines()[1].strip() == CASES[statement]


def test_quote_has_decorators_and_no_margin() -> None:
    text = textwrap.dedent(
        """\
        class TestA:
            @mark
            def test_it(self):
                f(1)
        """
    )
    found = quoted_test("t.py", text, ["TestA", "test_it"])
    assert found and (found.quote, found.edit) == ("@mark\ndef test_it(self):\n    f(1)", None)


@pytest.mark.parametrize(
    "text", ["def test_other(): pass\n", "def test_it(:\n", "def test_it():\n" + "    f()\n" * LONGEST_QUOTE]
)
def test_unquotable_test_gives_none(text: str) -> None:
    assert quoted_test("t.py", text, ["test_it"]) is None
