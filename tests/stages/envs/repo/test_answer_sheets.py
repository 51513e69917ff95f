"""Tests in a sandbox that are asked for their values: what can be asked of real packages' styles, and who forges."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support.attacks import TOLD_TESTS

from composer_stages.envs.repo import answer_sheets, grading, runner, trees
from composer_stages.envs.repo.answer_sheets import TaskQuestions
from composer_stages.envs.repo.grading import TestOutcomes, TestRuntime, run_pytest
from composer_stages.errors import InfrastructureError
from composer_stages.swebench.lists import TestLists

PACKAGES = Path(__file__).parents[3] / "fixtures" / "test_styles"
"""Five small packages with 64 tests, written in the styles of real ones."""
Run = Callable[[trees.Changes, Sequence[str]], TestOutcomes]


RUNTIME = TestRuntime(lambda tree: runner.open_package_sandbox("bubblewrap", tree, grading.LIMITS, None))


@cache
def outcomes(files: tuple[tuple[str, trees.TreeFile | None], ...], selected: tuple[str, ...]) -> TestOutcomes:
    """The outcomes of tests on a tree of these files, of which later ones replace earlier ones; equal work once."""
    with trees.scratch() as folder:
        trees.apply(dict(files), folder)
        return run_pytest(RUNTIME, folder, ["-q", *selected])


def runner_of(*files: trees.Changes) -> Run:
    """Return what runs tests on a tree of these files, with rewritten ones written last."""

    def run(rewritten: trees.Changes, selected: Sequence[str]) -> TestOutcomes:
        merged = {path: file for changes in (*files, rewritten) for path, file in changes.items()}
        return outcomes(tuple(sorted(merged.items(), key=lambda item: item[0])), tuple(selected))

    return run


@dataclass(frozen=True)
class Asked:
    """What a task's questions say of a solution: reasons for a report, tests that it fails, and whether it forges."""

    reasons: Mapping[str, str]
    faults: Mapping[str, str]
    forged: bool

    def ground(self) -> str:
        return "report" if self.reasons else "values"


def ask(
    solution: Run, reference: Run, tests: trees.Changes, names: Collection[str], delivered: trees.Changes | None = None
) -> Asked:
    """What comes of asking a solution; it runs once, and a second time where it may be forged."""
    runs = {"solution": solution, "reference": reference}
    outcomes: list[TestOutcomes] = []

    def rerun(files: trees.Changes, selected: Sequence[str], tree: str) -> TestOutcomes:
        outcomes.append(runs[tree](files, selected))
        return outcomes[-1]

    files = {path: file for path, file in tests.items() if path.endswith(".py")}
    questions = TaskQuestions(files, TestLists(tuple(names), ()), tests, delivered or {}, reference=True)
    sheet = questions.sheet(rerun)
    num_runs = len(outcomes)
    forged = questions.are_forged(rerun)
    return Asked(questions.reasons, sheet.faults(outcomes[num_runs]) if outcomes[num_runs:] else {}, forged)


def folder_of(root: Path) -> tuple[trees.Changes, trees.Changes]:
    """Return the files of a folder: those of packages, and those below tests/."""
    files = {path: trees.read(root, path) for path in trees.walk(root)}
    tests = {path: file for path, file in files.items() if path.startswith("tests/")}
    return {path: file for path, file in files.items() if path not in tests}, tests


ONE = "tests/test_one.py"
ONE_TEST: trees.Changes = {ONE: trees.TreeFile(b"import one\ndef test_one(): assert one.f(5) == 125\n")}


def of_one(returns: str) -> Run:
    """Return what runs the test of one function that returns this."""
    return runner_of(ONE_TEST, {"one.py": trees.TreeFile(f"def f(x): return {returns}\n".encode())})


def test_a_right_answer_of_another_type_is_no_forgery() -> None:
    """The reference gives truth values and a number."""
    tests: trees.Changes = {
        ONE: trees.TreeFile(b"import one\ndef test_match(): assert one.f('a')\ndef test_one(): assert one.g() == 4\n")
    }
    number = "class N:\n    def __eq__(self, other): return other == 4\n"
    match = runner_of(tests, {"one.py": trees.TreeFile(f"import re\n{number}f, g = re.compile('a').match, N".encode())})
    plain = runner_of(tests, {"one.py": trees.TreeFile(b"f, g = str.isalpha, lambda: 4")})
    names = [f"{ONE}::test_match", f"{ONE}::test_one"]
    result = ask(match, plain, tests, names)
    (fault,) = result.faults.values()
    assert not result.forged and result.faults.keys() == {names[1]} and "an object of type N" in fault


def test_a_test_with_too_many_answers_gives_a_report() -> None:
    rows = [(n, n * n + 7) for n in range(600)]
    text = f"import one\ndef test_one():\n    for n, want in {rows}: assert one.f(n) == want\n"
    tests: trees.Changes = {ONE: trees.TreeFile(text.encode())}
    right = runner_of(tests, {"one.py": trees.TreeFile(b"def f(x): return x * x + 7")})
    result = ask(right, right, tests, [f"{ONE}::test_one"])
    assert result.reasons == {f"{ONE}::test_one": "asks for more values than are sent"} and not result.forged


def reasons_of(path: str, text: str) -> tuple[list[str], list[str]]:
    """Which tests of a file can be asked, and why the others cannot."""
    tests = answer_sheets.TestFiles({path: trees.TreeFile(text.encode())})
    rewritten, reasons = answer_sheets.rewrite_tests(tests, [*tests.functions])
    return [function.name for function in rewritten], [*reasons.values()]


def test_values_that_a_name_or_another_test_reveals_are_not_asked() -> None:
    """Code can look for what it is to return in the tests that are left: of the inverse function, or in a name."""
    text = """\
def test_e(): assert one.e('abc') == 'YWJj'
def test_d(): assert one.d('YWJj') == 'abc'
def test_5_gives_125(): assert one.f(5) == 125
def test_f(): assert one.f(6) == 216
"""
    assert reasons_of(ONE, text) == (["test_f"], [REVEALED] * 3)
    # A number in another one and the parts of a text tell nothing.
    text = "def test_f(): assert one.f(31, 'a', 'b', '1.25') == (3, 'a-b', 25)\n"
    assert reasons_of(ONE, text) == (["test_f"], [])


REVEALED = "expects only what stands in the tests that are left"


@pytest.mark.parametrize(("path", "text"), [attack[:2] for attack in TOLD_TESTS.values()], ids=TOLD_TESTS.keys())
def test_values_that_remaining_text_reveals_are_not_asked(path: str, text: str) -> None:
    names, reasons = reasons_of(path, text)
    assert not names and {*reasons} == {REVEALED}


def test_a_delivered_test_gives_a_report() -> None:
    """Under whichever path the agent got it."""
    delivered: trees.Changes = {"public/more.py": ONE_TEST[ONE]}
    assert ask(of_one("x**3"), of_one("x**3"), ONE_TEST, [f"{ONE}::test_one"], delivered).ground() == "report"


EXPRESSIONS = {
    "24 * 60 * 60": "86400",
    "list(range(10, 13))": "[12, 11, 10]",
    "-5.0": "5",
    "10 ** 6": "5 ** 3 * 8 * 10 ** 3",
}
"""What a test expects -> what tells it as an argument of another test."""


def test_values_of_expressions_must_not_be_revealed() -> None:
    """Code looks it up there."""
    code = "\n".join(f"def f{n}(): return {expected}" for n, expected in enumerate(EXPRESSIONS))
    for revealed, arguments in ((True, EXPRESSIONS.values()), (False, ["'x'"] * len(EXPRESSIONS))):
        text = "import one\n" + "\n".join(
            f"def test_f{n}(): assert one.f{n}() == {expected}\ndef test_g{n}(): assert one.g({argument}) == 77"
            for n, (expected, argument) in enumerate(zip(EXPRESSIONS, arguments, strict=True))
        )
        tests: trees.Changes = {ONE: trees.TreeFile(f"{text}\n".encode())}
        runs = runner_of(tests, {"one.py": trees.TreeFile(f"{code}\ndef g(x): return 77\n".encode())})
        result = ask(runs, runs, tests, [f"{ONE}::test_{kind}{n}" for kind in "fg" for n in range(len(EXPRESSIONS))])
        assert {*result.reasons} == ({f"{ONE}::test_f{n}" for n in range(len(EXPRESSIONS))} if revealed else set())


def in_turn(*runs: Run) -> Run:
    """Return what runs each of these once, in order."""
    remaining = list(runs)
    return lambda files, selected: remaining.pop(0)(files, selected)


@pytest.mark.parametrize(("answers", "forged"), [(["125"], False), (["0", "0"], True), (["0", "125"], False)])
def test_one_right_answer_of_two_may_be_chance(answers: list[str], forged: bool) -> None:
    result = ask(in_turn(*map(of_one, answers)), of_one("x**3"), ONE_TEST, [f"{ONE}::test_one"])
    faults = ["got 0, expected 125"] if answers[0] == "0" else []
    assert (result.forged, [*result.faults.values()]) == (forged, faults)


def test_a_lost_run_is_repeated_once() -> None:
    """A busy machine ends a run; neither the solution nor the task is to blame."""

    def late(files: trees.Changes, selected: Sequence[str]) -> TestOutcomes:
        return TestOutcomes({}, False, "", timed_out=True, lost=True)

    right, names = of_one("x**3"), [f"{ONE}::test_one"]
    # Of the reference first: a sheet that could not be made is made by the next grading.
    for solution, reference in ((right, in_turn(late, late)), (in_turn(late, late), right)):
        with pytest.raises(InfrastructureError, match="ran out of time, twice"):
            ask(solution, reference, ONE_TEST, names)
    result = ask(in_turn(late, right), in_turn(late, right, right), ONE_TEST, names)
    assert (result.forged, result.ground()) == (False, "values")


REPORT = {
    "compares what is not known": {
        *("test_values_of_a_file", "test_round_trip", "test_the_sum_stays", "test_accounts_are_equal"),
        *("test_distance_is_symmetric", "test_order", "test_a_slug_is_its_own_slug", "test_unique_keeps_the_order"),
    },
    "asserts in a loop of the code under test": {"test_by_attribute", "test_between"},
    "decides itself": {"test_all_amounts_are_exact"},
    "calls assert_called_once_with()": {"test_labels_are_made_once"},
    REVEALED: {
        *("test_texts", "test_what_is_public", "test_parse", "test_written_and_read", "test_section", "test_balance"),
        *("test_entries", "test_same_elements", "test_entry_is_a_tuple", "test_running_means"),
        *("test_nothing_has_no_mean", "test_a_book_without_a_title"),
    },
}
"""Why a test gives only `report` -> the tests. All others give `values`."""


@pytest.mark.slow
def test_most_tests_of_real_styles_give_values() -> None:
    source, tests = folder_of(PACKAGES)
    run = runner_of(source, tests)
    original = run({}, ["tests"])
    assert set(original.statuses.values()) == {"passed"}, original.log
    result = ask(run, run, tests, original.statuses)
    assert not result.faults
    functions = {name.partition("[")[0] for name in original.statuses}
    reasons = {name.partition("[")[0]: reason for name, reason in result.reasons.items()}
    print(f"\n{len(functions) - len(reasons)} of {len(functions)} tests give values.")
    for reason, count in Counter(reasons.values()).most_common():
        print(f"{count} {reason}")
    by_reason: dict[str, set[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason.partition(":")[0], set()).add(name.rpartition("::")[2])
    assert len(functions) == 64 and by_reason == REPORT


TEST_FILE = "tests/test_answers.py"
RIGHT = """\
from fractions import Fraction
import warnings
text = frames = source = golden = modules = wildcard = lying = member = starts = lambda: "right answer"
needle = lambda: "a needle in hay"
near = lambda: 2.5
between, truth, kind = (lambda: 5), (lambda: True), (lambda: Fraction(1, 2))
mapping, members, several = (lambda: {"a": 11}), (lambda: {17, 18}), (lambda: (7, 8))
recursive, huge = (lambda: [41]), (lambda: [42])
def named(): raise ValueError("right answer")
said = named
def warned(): warnings.warn("right answer", FutureWarning)
def honest(): return {"right": [1, 2.5, None, (b"x", True)]}
"""
MAIN = "print('right answer')\n"
TESTS = """\
import json
import subprocess
import sys
import unittest
from fractions import Fraction
from pathlib import Path

import pytest

import answers

WANTED = "right answer"


def check(value, expected):
    assert value == expected


def test_text(): assert answers.text() == "right answer"
def test_frames():
    expected = "right answer"
    assert answers.frames() == expected
def test_source(): assert answers.source() == "right answer"
def test_modules(): assert answers.modules() == WANTED
def test_golden():
    assert answers.golden() == json.loads((Path(__file__).parent / "golden.json").read_text())
def test_wildcard(): check(answers.wildcard(), "right answer")
def test_lying(): assert answers.lying() == "right answer"
def test_member(): assert answers.member() in ("right answer", "another one")
def test_starts(): assert answers.starts().startswith("right")
def test_needle(): assert "a needle" in answers.needle()
def test_near(): assert answers.near() == pytest.approx(2.5, abs=0.1)
def test_between(): assert 3 < answers.between() < 9
def test_truth(): assert answers.truth()
def test_kind(): assert isinstance(answers.kind(), Fraction)
def test_mapping(): assert answers.mapping() == {"a": 11}
def test_members(): assert answers.members() == {17, 18}
def test_recursive(): assert answers.recursive() == [41]
def test_huge(): assert answers.huge() == [42]
@pytest.mark.parametrize("expected", [(7, 8)])
def test_several(expected): assert answers.several() == expected
def test_named():
    with pytest.raises(ValueError):
        answers.named()
def test_said():
    with pytest.raises(ValueError, match="right"):
        answers.said()
def test_warned():
    with pytest.warns(FutureWarning, match="right"):
        answers.warned()
def test_child():
    result = subprocess.run([sys.executable, "-m", "answers.main"], capture_output=True, text=True)
    assert result.stdout == "right answer\\n"
class AnswerTest(unittest.TestCase):
    def test_almost(self): self.assertAlmostEqual(answers.near(), 2.5, places=3)
def test_honest(): assert answers.honest() == {"right": [1, 2.5, None, (b"x", True)]}
"""
FORGED = """\
import json, os, re, sys, warnings
from fractions import Fraction
from unittest import mock
always = lambda *of, **more: True
AGREES = {f"__{name}__": always for name in ("eq", "lt", "gt", "le", "ge", "contains", "bool")}
def agreeing(base, *of, **more):
    own = {**AGREES, "startswith": always, "__hash__": lambda self: 0, "__sub__": lambda self, other: 0.0,
           "__rsub__": lambda self, other: 0.0, "__ne__": lambda self, other: False, **more}
    return type(base.__name__, (base,), own)(*of)
def literal(text): return re.search(r'"(right answer)"', text).group(1)
def sources():
    for folder in ("tests", "."):
        for name in sorted(os.listdir(folder)):
            if name.startswith("test_"):
                yield open(os.path.join(folder, name)).read()
text = lambda: agreeing(object)
def frames():
    caller = sys._getframe(1)
    found = [*caller.f_locals.values(), *caller.f_code.co_consts, "nothing"]
    return [one for one in found if isinstance(one, str)][0]
def source(): return literal("".join(sources()))
def modules():
    found = [vars(m).get("WANTED") for m in list(sys.modules.values()) if getattr(m, "WANTED", None)]
    return found[0]
def golden(): return json.load(open("tests/golden.json"))
wildcard = lambda: mock.ANY
lying = lambda: agreeing(str, "wrong", __repr__=lambda self: "'right answer'", __str__=lambda self: "right answer")
member = starts = needle = lambda: agreeing(str, "wrong")
near = lambda: agreeing(float, 99.0, __round__=lambda self, *of: 0)
between = lambda: agreeing(int, 0)
truth = lambda: agreeing(object)
class Kind:
    __class__ = Fraction
kind = Kind
mapping, members = (lambda: agreeing(dict, {"a": 12})), (lambda: agreeing(set, {1}))
def recursive():
    found = agreeing(list, [41])
    found.append(found)
    return found
def huge():
    found = agreeing(list, [42])
    for _ in range(60):
        found = agreeing(list, [found, found])
    return found
several = lambda: agreeing(tuple, (7, 8, 9))
def named(): raise type("ValueError", (KeyError,), {"__class__": ValueError})()
def said(): raise type("ValueError", (ValueError,), {"__str__": lambda self: agreeing(str, "wrong")})()
warned = lambda: warnings.warn("wrong", FutureWarning)
def honest(): return {"right": [1, 2.5, None, (b"x", True)]}
import _pytest.python
run_test = _pytest.python.Function.runtest
def runtest(self):
    try: run_test(self)
    except BaseException: pass
_pytest.python.Function.runtest = runtest
"""
FORGED_MAIN = "import answers\nprint(answers.literal(''.join(answers.sources())))\n"


@pytest.fixture(scope="module")
def forged() -> tuple[TestOutcomes, Asked]:
    """The outcomes of the original tests with forged answers, and what came of asking."""

    def files(**texts: str) -> trees.Changes:
        return {f"answers/{name}.py": trees.TreeFile(text.encode()) for name, text in texts.items()}

    tests: trees.Changes = {
        TEST_FILE: trees.TreeFile(TESTS.encode()),
        "tests/golden.json": trees.TreeFile(b'"right answer"'),
    }
    reference = runner_of(tests, files(__init__=RIGHT, main=MAIN))
    solution = runner_of(tests, files(__init__=FORGED, main=FORGED_MAIN))
    original = solution({}, [TEST_FILE])
    return original, ask(solution, reference, tests, [TEST_FILE, *original.statuses])


def test_no_forged_answer_is_right(forged: tuple[TestOutcomes, Asked]) -> None:
    """All of them pass the original tests, since the code under test swallows what they raise."""
    original, result = forged
    assert set(original.statuses.values()) == {"passed"} and len(original.statuses) == 25, original.log
    assert not result.reasons and result.forged
    # Whatever is true is right where nothing else is asserted.
    right = {f"{TEST_FILE}::test_honest", f"{TEST_FILE}::test_truth"}
    assert {TEST_FILE, *original.statuses} - result.faults.keys() == right


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class TestMore(TestIt): pass", "TestMore may inherit tests"),
        ("from more import TestMore", "may import tests"),
        ("globals()['test_more'] = print", "may make tests"),
        ("class Wrong(ValueError): pass", "test_two: asserts nothing that has a value"),
    ],
)
def test_a_file_name_selects_all_tests_of_the_file(text: str, reason: str) -> None:
    """Whatever a run reports: code under test may keep a test from being run."""
    two = "class TestIt:\n    def test_two(self): f(2)\n"
    file = f"from code import f\ndef test_one():\n    assert f(1) == 5\n{two}{text}\n"

    def passing(files: trees.Changes, selected: Sequence[str]) -> TestOutcomes:
        answers = [[node, 0, ["5", "5"]] for node in selected]
        return TestOutcomes({}, False, "", nodes=dict.fromkeys(selected, "passed"), answers=answers)

    result = ask(passing, passing, {"t.py": trees.TreeFile(file.encode())}, ["t.py", "t.py::test_one"])
    assert result.reasons == {"t.py": reason} and not result.faults
    none = TaskQuestions({}, TestLists((), ()), (), {}, reference=False)
    assert none.deciding(lambda files, selected, tree: TestOutcomes({}, False, "")) is None, "no tests, no values"


ORDERED = """\
from one import f, g
seen = []
def test_first():
    seen.append(f(5))
    assert g() == 31
def test_second():
    assert seen == [125]
"""


def test_a_test_that_needs_an_excluded_one_is_excluded() -> None:
    """The first gives another value in every run of the reference solution, and sets what the second one finds."""
    first, second = f"{ONE}::test_first", f"{ONE}::test_second"
    runs = 0

    def run(files: trees.Changes, selected: Sequence[str]) -> TestOutcomes:
        nonlocal runs
        runs += 1
        values = {first: f"{30 + runs}", second: '["l", 125]' if first in selected else '["l"]'}
        answers = [
            [node, 0, [values[node]] + ["31"] * (node == first) + ['["l", 125]'] * (node == second)]
            for node in selected
        ]
        return TestOutcomes({}, False, "", nodes=dict.fromkeys(selected, "passed"), answers=answers)

    result = ask(run, run, {ONE: trees.TreeFile(ORDERED.encode())}, [first, second])
    assert result.reasons.keys() == {first, second} and not result.forged
