"""Tests turned into questions: what is asked, what is withheld, and why a test cannot be asked."""

import ast
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from composer_stages.envs.repo import trees
from composer_stages.envs.repo.answer_sheets import rewrite_tests, version_files
from composer_stages.envs.repo.parsed_tests import FunctionNode, TestFiles, TestLocation
from composer_stages.envs.repo.pruning import prune_module
from composer_stages.envs.repo.questions import NotAskable, rewrite_test

HEAD = """\
import json, math, pytest, re
from decimal import Decimal
from code import f, g, Problem
from .helpers import alike
LIMIT = 17
TABLE = [(1, "one"), (2, "two")]
@pytest.fixture
def wanted():
    return {"a": 12}
@pytest.fixture
def strict():
    yield 1
    assert f(3) == 4
def check(value, expected, digits=2):
    found = round(value, digits)
    assert found == expected, f"not {expected}"
def same(one, other):
    return one == other
def made(name):
    assert f(name)
    return g(name)
"""

AROUND = """\
@pytest.fixture
def log():
    yield []
    assert f(3) == 4
@pytest.fixture
def runner(log): return f(log)
@pytest.fixture(name="clean")
def cleaned():
    yield
    assert f(3) == 4
"""


def asked(
    test: str, head: str = HEAD, modules: Mapping[str, ast.Module] = MappingProxyType({})
) -> tuple[str, tuple[str, ...]]:
    """Return the withheld version of the last function of a text, and its relations."""
    module = ast.parse(head + test)
    function = module.body[-1]
    assert isinstance(function, FunctionNode)
    rewritten = rewrite_test(module, None, function, {}, modules)
    return ast.unparse(rewritten.withheld), rewritten.relations


def body(*lines: str) -> str:
    return "def test_it():\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "relations", "kept"),
    [
        (["assert f(1) == 'abc'"], ["=="], "_composer_ask(0, f(1))"),
        (["assert 'abc' == f(1) == g(1)"], ["==", "=="], "_composer_ask(1, g(1))"),
        (["want = ['abc']", "assert f(1) == want, 'not abc'"], ["=="], "_composer_ask(0, f(1))"),
        (["assert f(1) and not g(2)"], ["true", "not true"], "_composer_ask(1, not not g(2))"),
        (["assert not (f(1) or g(2))"], ["not true", "not true"], "_composer_ask(1, not not g(2))"),
        (["assert f(1) is None"], ["=="], "_composer_ask(0, f(1) is None)"),
        (["assert 5 < f(1) <= 99"], [">", "<="], "_composer_ask(0, f(1))"),
        (["assert 'abc' not in f(1)"], ["not has"], "_composer_ask(0, f(1))"),
        (["assert f(1) in (5, 6)"], ["in"], "_composer_ask(0, f(1))"),
        (["assert f(1) != 'abc'"], ["!="], "_composer_ask(0, f(1))"),
        (["assert f(1) == pytest.approx(0.5, abs=0.1)"], ["=="], "_composer_ask(0, f(1))"),
        (["assert abs(f(1) - 2.5) < 1e-6"], ["within <"], "_composer_ask(0, f(1))"),
        (["assert math.isclose(2.5, f(1))"], ["isclose"], "_composer_ask(0, f(1))"),
        (["assert isinstance(f(1), (int, Problem))"], ["subclass of"], "_composer_ask(0, type(f(1)))"),
        (["assert f(1).endswith('abc')"], ["endswith"], "_composer_ask(0, f(1))"),
        (["assert re.search('a.c', f(1))"], ["re.search"], "_composer_ask(0, f(1))"),
        (["with pytest.raises(Problem, match='abc') as e:", "    f(1)"], ["caught"], "with _composer_caught(0) as e:"),
        (["with pytest.raises(Problem) as e:", "    f(1)", "e.match('abc')"], ["caught", "re.search"], "str(e.value)"),
        (["pytest.raises(Problem, f, 1)"], ["caught"], "f(1)"),
        (["with pytest.warns(UserWarning):", "    assert f(1) == 'abc'"], ["==", "warned"], "_composer_warned(1)"),
        (["for n, word in TABLE:", "    assert f(n) == word"], ["=="], "[(1, None), (2, None)]"),
        (["for n, word in {1: 'abc'}.items():", "    assert f(n) == word"], ["=="], "{1: None}.items()"),
        (["assert f(1) == json.loads('[\"abc\"]')"], ["=="], "_composer_ask(0, f(1))"),
        (["assert f(LIMIT) == Decimal('1.5')"], ["=="], "_composer_ask(0, f(LIMIT))"),
        (["check(f(1), 3.25, digits=1)"], ["=="], "_check_1_found = round(_check_1_value, _check_1_digits)"),
        (["x = made('b')", "assert x == 'abc'"], ["true", "=="], "x = g(_made_1_name)"),
        (["assert f(1) == [Problem('abc')]"], ["=="], "_composer_ask(0, f(1))"),
        (["want = Problem('abc')", "assert want == f(1)"], ["=="], "_composer_ask(0, f(1))"),
        (["assert f(1) * 2 == 'abc'"], ["=="], "_composer_ask(0, f(1) * 2)"),
        (
            ["x = []", "f(x)", "assert 'abc' in x", "assert x", "assert x[0] > 'abc'"],
            ["has", "true", ">"],
            "ask(2, x[0])",
        ),
        (["x = [4]", "y = x", "f(y)", "assert x[0] >= 99"], [">="], "_composer_ask(0, x[0])"),
        (["for x in [[4], [5]]:", "    f(x)", "    assert 99 in x"], ["has"], "_composer_ask(0, x)"),
        (["x = 5", "f(x)", "assert g(1) == [x, 'abc']"], ["=="], "_composer_ask(0, g(1))"),
        (["f('out')", "assert 'abc' in open('out').read()"], ["has"], "_composer_ask(0, open('out').read())"),
    ],
)
def test_withheld_versions_hold_no_expected_value(lines: list[str], relations: list[str], kept: str) -> None:
    text, text_relations = asked(body(*lines))
    assert list(text_relations) == relations and kept in text
    assert not any(
        expected in text for expected in ("abc", "a.c", "3.25", "2.5", "0.5", "Problem", "UserWarning", "two", "99")
    )


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["f(1)"], "no-asserted-value"),
        (["assert f(1) == g(1)"], "compares-unknown"),
        (["x = f(1)", "assert g(1) == x"], "compares-unknown"),
        (["x = []", "x.append(f(1))", "assert g(1) == x"], "compares-unknown"),
        (["len = f", "assert f() == len('abc')"], "compares-unknown"),
        (["x = x + [7] if f() else [7]", "assert g() == x"], "compares-unknown"),
        (["x = [3, 'abc']", "assert f(x) == x"], "compares-unknown"),
        (["x = (3, 'abc')", "assert f(x) == x"], "holds-expected-value"),
        (["x = [3]", "f(x)", "assert x[0] < x[1]"], "compares-unknown"),
        (["x = [3]", "f(x)", "assert x[0] - 5 == 0"], "decides-itself"),
        (["x = [3]", "f(x)", "y = x[0] - 5", "assert not y"], "decides-itself"),
        (["f('a')", "assert open('a').read() < open('b').read()"], "compares-unknown"),
        (["assert f(1) == 5 or g(1) == 6"], "decides-itself"),
        (["assert (f(1) or 5) == 5"], "decides-itself"),
        (["assert max(f(1), 5) == 5"], "decides-itself"),
        (["ok = f(1) == 5", "assert ok"], "decides-itself"),
        (["ok = True", "ok = f(1) == 5", "assert ok"], "decides-itself"),
        (["ok = 0", "ok += f(1) - 5", "assert not ok"], "decides-itself"),
        (["assert all(one == 5 for one in f(1))"], "decides-itself"),
        (["assert abs(f(1) - g(1)) < 5"], "decides-itself"),
        (["assert same(f(1), 5)"], "decides-itself"),
        (["assert alike(f(1), 5)"], "decides-itself"),
        (["assert math.fsum([f(1), -5]) == 0"], "decides-itself"),
        (["assert f(1).__eq__(5)"], "decides-itself"),
        (["for n in f(1):", "    assert g(n) == 5"], "asserts-in-loop"),
        (["if f(1):", "    assert g(1) == 5"], "asserts-under-condition"),
        (["if f(1):", "    return", "assert g(1) == 5"], "may-return-early"),
        (["try:", "    assert f(1) == 5", "except TypeError:", "    pass"], "asserting-statement"),
        (["with pytest.raises(Problem):", "    assert f(1) == 5"], "asserts-in-raising-block"),
        (["with suppress(ValueError):", "    assert f(1) == 5"], "asserts-in-block"),
        (["def inner():", "    assert f(1) == 5", "inner()"], "asserting-statement"),
        (["assert f(1) == 5", "check(*f(2))"], "calls-function"),
        (["assert f(1) == 5", "g.assert_called_once_with(5)"], "calls-function"),
        (["assert Problem(1) == Problem(2)"], "compares-unknown"),
        (["assert f(1) is g(1)"], "compares-objects"),
        (["global x", "assert f(1) == 5"], "binds-names"),
    ],
)
def test_tests_that_are_not_askable_have_a_reason(lines: list[str], reason: str) -> None:
    with pytest.raises(NotAskable) as error:
        asked(body(*lines))
    assert error.value.reason.code == f"envs.repo.{reason}"


@pytest.mark.parametrize(
    ("test", "head", "reason"),
    [
        ("def test_it(strict):\n    assert f(1) == 5", HEAD, "uses-asserting-function"),
        ("@raises(ValueError)\ndef test_it():\n    assert f(1) == 5", HEAD, "asserting-decorator"),
        ("@pytest.mark.parametrize('w', [f(2)])\ndef test_it(w):\n    assert f(1) == w", HEAD, "compares-unknown"),
        ("def test_it(runner): assert g(1) == 5", HEAD + AROUND, "uses-asserting-function"),
        (
            "@pytest.mark.usefixtures('clean')\ndef test_it(): assert g(1) == 5",
            HEAD + AROUND,
            "uses-asserting-function",
        ),
        ("def test_it(clean): assert g(1) == 5", HEAD + AROUND, "uses-asserting-function"),
        ("def test_it(): assert f() == len('abc')", "from code import *\n", "compares-unknown"),
    ],
)
def test_fixtures_decorators_and_star_imports_prevent_questions(test: str, head: str, reason: str) -> None:
    with pytest.raises(NotAskable) as error:
        asked(test, head)
    assert error.value.reason.code == f"envs.repo.{reason}"


HELPERS = """\
def compare(f, x, want):
    assert f(x) == want
def fits(one, other):
    return one == other
def doubled(x):
    return [x, x]
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["compare(f, 10, 55)", "assert g(3) == 27"], "calls-function"),
        (["tools.compare(f, 10, 55)", "assert g(3) == 27"], "calls-function"),
        (["ok = compare(f, 10, 55)", "assert g(3) == 27"], "calls-function"),
        (["assert fits(f(10), 55)"], "decides-itself"),
    ],
)
def test_functions_of_other_test_files_assert_and_decide(lines: list[str], reason: str) -> None:
    head = "import tools\nfrom tools import compare, fits, doubled\nfrom code import f, g\n"
    modules = {"tools": ast.parse(HELPERS)}
    assert asked(body("assert f(doubled(3)) == 27"), head, modules)[1] == ("==",)
    with pytest.raises(NotAskable) as error:
        asked(body(*lines), head, modules)
    assert error.value.reason.code == f"envs.repo.{reason}"


def test_columns_and_ids_of_rows_are_emptied() -> None:
    rows = "[(1, 'abc'), pytest.param(2, 'abc', id='gives abc')], ids=['abc', 'b']"
    text, _ = asked(f"@pytest.mark.parametrize('n, word', {rows})\ndef test_it(n, word):\n    assert f(n) == word")
    assert "[(1, None), pytest.param(2, None)])" in text and "abc" not in text


def test_a_pruned_module_keeps_what_runs_by_itself() -> None:
    pruned = "import a\nfrom b import c\nx = 1\ny = x\nprint(y)\n\n@pytest.fixture(autouse=True)\ndef z(c):\n    pass"
    more = pruned.replace("import c", "import c, d") + "\ndef w(): d\n"
    assert ast.unparse(prune_module(ast.parse(more), {})) == pruned


SOURCE = f'''\
"""Tests: abc."""
from __future__ import annotations
{HEAD}
EXPECTED = "abc"
class TestIt:
    unused = "abc"
    def setup_method(self):
        self.x = LIMIT
    def test_one(self, wanted):
        """Gives abc."""
        assert f(self.x) == EXPECTED
        assert f(2) == wanted
    def test_two(self):
        assert f(EXPECTED) == g(1)
def test_three():
    assert f(EXPECTED) == 44
'''


def withheld(*names: str) -> str:
    """The withheld file of some tests of SOURCE."""
    tests = TestFiles({"t.py": trees.TreeFile(SOURCE.encode())})
    rewritten = {
        function: rewrite_test(tests.modules["t.py"], tests.owner(function), node, {})
        for function, node in tests.functions.items()
        if function.name in names
    }
    (file,) = version_files(tests, rewritten).values()
    assert file is not None
    return file.data.decode()


def test_a_withheld_file_holds_only_what_its_tests_need() -> None:
    text = withheld("test_one")
    assert text.startswith("from __future__") and "setup_method" in text and "LIMIT" in text
    absent = ("abc", "EXPECTED", "unused", "12", "wanted", "test_two", "test_three", "check", "Problem", "g\n")
    assert not [name for name in absent if name in text]
    assert "EXPECTED = 'abc'" in withheld("test_three")


def test_a_constant_that_another_test_needs_is_no_expected_value() -> None:
    tests = TestFiles({"t.py": trees.TreeFile(SOURCE.encode())})
    first, three = TestLocation("t.py", ("TestIt",), "test_one"), TestLocation("t.py", (), "test_three")
    rewritten, reasons = rewrite_tests(tests, [first, three])
    assert list(rewritten) == [three] and reasons == {first: "holds the expected value in EXPECTED"}
    assert list(rewrite_tests(tests, [first])[0]) == [first]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("t.py::test_three[a::b]", TestLocation("t.py", (), "test_three")),
        ("test_one (t.TestIt)", TestLocation("t.py", ("TestIt",), "test_one")),
        ("test_three", TestLocation("t.py", (), "test_three")),
        ("u.py::test_three", None),
        ("test_one (t.Other)", None),
        ("test_none", None),
    ],
)
def test_tests_are_found_by_the_names_of_pytest_and_of_unittest(name: str, found: TestLocation | None) -> None:
    assert TestFiles({"t.py": trees.TreeFile(SOURCE.encode())}).locate(name) == found
