"""Tests of a function: which can be asked, and how they are played with what a program returned.

The program under test runs in one sandbox and sees arguments alone; the test, with its own helpers and expected values,
runs in another with the returned values in place of the function (guest/). Both begin anew where a call turns out
to have other arguments, as of a changed list or of `f(f(1))`.

In order: which tests can be asked, the program under test, plays.
"""

import ast
import builtins
import importlib.util
import json
import math
import re
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

from composer_stages.data_files import load_toml
from composer_stages.errors import InfrastructureError, Refusal
from composer_stages.layout import shortened
from composer_stages.sandbox import Answer, Call, Limits, judge
from composer_stages.sandbox.bubblewrap import GUEST, guest_folder
from composer_stages.sandbox.guest.values import decoded, encoded
from composer_stages.words import Sentence

LIMITS = Limits(wall_s=12.0, cpu_s=4, memory_mb=512, processes=32, file_mb=1, disk_mb=8, output_bytes=1 << 22)
"""Of all calls of one program. Processor time is the tighter limit: it does not depend on how busy the machine is."""
CHECKING = replace(LIMITS, wall_s=60.0, cpu_s=20, memory_mb=1024, output_bytes=1 << 24)
TIMES = 3
"""How many times as long as the solution a program may take, and return as much, at least."""
SLOW = replace(LIMITS, wall_s=120.0, cpu_s=40, memory_mb=2048, output_bytes=1 << 26)
"""Of a solution that is measured."""
MOST_ROUNDS = 5
ALLOWED = ("numpy",)
"""Packages that tests may use: EvalPlus compares floats by numpy."""
KNOWN_MODULES = sys.stdlib_module_names | {*ALLOWED}
KNOWN_TYPES = (int, float, complex, str, bytes, list, tuple, dict, set, range, Counter, deque, Fraction, Decimal)
ATTRIBUTES = frozenset(chain.from_iterable(map(dir, KNOWN_TYPES)))

RUNNER = re.compile(r"\b(?:unittest|pytest)\.main\(")
OBSERVING = frozenset(
    {"redirect_stdout", "redirect_stderr", "stdout", "stderr", "capsys", "patch", "monkeypatch", "environ"}
)
"""Names by which tests look at, or change, what the function does in its process, which is not theirs."""


class CannotAsk(Refusal):
    """A test cannot be played with recorded results; the text is the reason."""


@lru_cache(maxsize=4096)
def check_test(test: str, function: str, before: str = "") -> None:
    """Raise CannotAsk for a test that calls no function under test, or does with a result what a copy of it decides.

    before: code in front of the test.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree, tree_before = ast.parse(test), ast.parse(before)
            nodes = [*ast.walk(tree)]
    except (SyntaxError, ValueError) as error:
        raise CannotAsk("envs.code.not-python", error=error) from None
    except (RecursionError, MemoryError):
        raise CannotAsk("envs.code.nested-too-deep") from None
    function = called_name(function)
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound = {name for node in (*nodes, *ast.walk(tree_before)) for name in _bound(node)}
    if absent := [name for node in nodes for name in _imported(node, function) if name not in KNOWN_MODULES]:
        raise CannotAsk("envs.code.imports-package", name=absent[0])
    used = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if unknown := [name for name in used if name not in bound | {function} and not hasattr(builtins, name)]:
        raise CannotAsk("envs.code.undefined-name", name=unknown[0])
    checks = [*filter(_is_check, tree.body)]
    names = {function, *(node.args.args[0].arg for node in checks if node.args.args)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names]
    if not calls:
        raise CannotAsk("envs.code.no-call", function=function)
    if not any(map(_is_assertion, nodes)):
        raise CannotAsk("envs.code.asserts-nothing")
    if unrun := next(_unrun(tree), ""):
        raise CannotAsk("envs.code.test-not-run", name=unrun)
    of_calls = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and node.value in calls
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        name = str(getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))))
        if name in OBSERVING:
            raise CannotAsk("envs.code.observes-process", name=name)
        if node in calls and isinstance(node, ast.Call):
            for part in chain.from_iterable(map(ast.walk, (*node.args, *(word.value for word in node.keywords)))):
                if isinstance(part, ast.Lambda) or (isinstance(part, ast.Name) and part.id in defined):
                    raise CannotAsk("envs.code.no-plain-value", expression=_short(part))
        elif isinstance(node, ast.Attribute) and node.attr not in ATTRIBUTES:
            if node.value in calls or getattr(node.value, "id", "") in of_calls:
                raise CannotAsk("envs.code.operation-on-result", expression=_short(node))
        elif isinstance(node, ast.Compare) and not all(map(_decides, node.ops, node.comparators)):
            sides = [node.left, *node.comparators]
            if not all(isinstance(side, ast.Name) or side in calls for side in sides):
                raise CannotAsk("envs.code.compares-identity", expression=_short(node))


def _is_assertion(node: ast.AST) -> bool:
    """Return whether a node of a test may fail it: `assert`, `raise`, or a call of `assertEqual` and its like."""
    called = node.func if isinstance(node, ast.Call) else None
    name = str(getattr(called, "attr", getattr(called, "id", "")))
    return isinstance(node, ast.Assert | ast.Raise) or re.match("assert[A-Z_]", name) is not None


def _unrun(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions with assertions that nothing runs: neither the test itself, nor who plays it."""
    used = _used(tree)
    run = {id(part) for node in tree.body if _is_check(node) or _is_played(node) for part in (node, *_methods(node))}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in run and node.name not in used:
            yield from [node.name] if any(map(_is_assertion, ast.walk(node))) else []


def _used(tree: ast.Module) -> set[str]:
    loads = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load))
    return {str(getattr(node, "attr", getattr(node, "id", ""))) for node in loads}


def _is_played(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Return whether a statement defines a test that pytest or unittest runs: a function without arguments, a class."""
    if isinstance(node, ast.ClassDef):
        return any("TestCase" in ast.unparse(base) for base in node.bases)
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return False
    return len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)


def _methods(node: ast.AST) -> list[ast.FunctionDef]:
    """Return the tests of a class, and what is run before and behind them."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [part for part in body if isinstance(part, ast.FunctionDef) and re.match("test|setUp|tearDown", part.name)]


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name


def _decides(comparing: ast.cmpop, operand: ast.expr) -> bool:
    """Return whether a comparison can be made with a copy: identity with None, True, False and built-in types alone."""
    if not isinstance(comparing, ast.Is | ast.IsNot):
        return True
    if isinstance(operand, ast.Name):
        return isinstance(getattr(builtins, operand.id, None), type)
    return isinstance(operand, ast.Constant) and isinstance(operand.value, bool | None)


def _short(node: ast.AST) -> str:
    return shortened(" ".join(ast.unparse(node).split()))


@lru_cache(maxsize=4096)
def wrapped(test: str, function: str) -> CodeType:
    """Return a test whose statements report how they ended; calls of `check` are left to who plays it.

    Functions and classes of tests that nothing else in it runs are played at its end. It does not import the function.
    """
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(test)
        tree.body = [node for node in tree.body if not _imports(node, function)]
        checks = [*filter(_is_check, tree.body)]
        if checks:
            tree.body = [node for node in tree.body if node in checks or "check(" not in ast.unparse(node)]
        functions = [node.name for node in filter(_is_played, tree.body) if node.name not in _used(tree)]
        tree.body = [*map(_wrapped, tree.body), *ast.parse("\n".join(f"_play.run({name})" for name in functions)).body]
        return compile(ast.fix_missing_locations(tree), "test", "exec", dont_inherit=True)


def _imports(node: ast.stmt, function: str) -> bool:
    """Return whether a statement imports the function under test, from whatever module it was in."""
    names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
    return function in names or ("*" in names and str(getattr(node, "module", "")) not in KNOWN_MODULES)


def _imported(node: ast.AST, function: str) -> list[str]:
    """Return the packages that a statement imports, but for the module of the function under test."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not _imports(node, function):
        return [str(node.module).partition(".")[0]]
    return []


def _is_check(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


def _wrapped(statement: ast.stmt) -> ast.stmt:
    """Return a statement that reports how it ended, and lets the next one run."""
    if isinstance(statement, (ast.For, ast.While, ast.If)):
        statement.body = [*map(_wrapped, statement.body)]
        statement.orelse = [*map(_wrapped, statement.orelse)]
        return statement
    if _is_check(statement) or _is_played(statement):
        for function in _methods(statement) if isinstance(statement, ast.ClassDef) else [statement]:
            function.body = [*map(_wrapped, function.body)]
        return statement
    if RUNNER.search(ast.unparse(statement)):
        return ast.Pass()
    simple = (ast.Assert, ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Try, ast.With, ast.Delete)
    if not isinstance(statement, simple):
        return statement
    is_assertion = isinstance(statement, ast.Assert)
    text = ast.unparse(ast.Assert(statement.test) if isinstance(statement, ast.Assert) else statement)
    end = f"_play.end({text!r}, {is_assertion}, _error)"
    [wrapped] = ast.parse(
        f"try:\n    _play.begin()\n    _error = None\n    pass\n    {end}\nexcept BaseException as _error:\n    {end}"
    ).body
    wrapped.body[2] = statement  # type: ignore[attr-defined]
    return wrapped


RETURNED = "_composer_returned"
PROGRAMS: dict[str, str] = load_toml(__package__, "programs.toml")
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)


def called_name(function: str) -> str:
    """Return the name by which a test calls a function, which may be a method: twoSum of Solution().twoSum."""
    return function.rpartition(".")[2]


def build_program(before: str, code: str, function: str) -> str:
    """Return the program to execute: the code that the task gives, the answer's code, and what calls the function."""
    futures = "\n".join(FUTURE.findall(code))  # have to stand first
    return "\n".join([futures, before, FUTURE.sub("", code), PROGRAMS["returned"].format(function=function)])


Calls = tuple[tuple[str, ...], tuple[str, ...]]
"""The encoded arguments of the calls of the shown and of the deciding tests."""


@dataclass(frozen=True, eq=False)
class Tests:
    """The tests of a problem: what the agent can read, and what decides.

    given: variables of them. calls: the encoded arguments of their calls, as far as these do not depend on results.
    """

    __test__ = False  # pytest takes classes named Test* for tests

    before: str
    shown: str
    deciding: str
    function: str
    given: dict[str, Any] = field(default_factory=dict)
    calls: Calls = ((), ())
    limits: Limits = LIMITS


@dataclass(frozen=True)
class AssertionOutcome:
    """How a statement of a test ended, and the calls that it made, with their answers."""

    holds: bool
    text: str
    calls: Sequence[tuple[str, Answer]]


@dataclass(frozen=True)
class Played:
    """The outcomes of the shown and of the deciding tests, the calls of both, and their answers.

    cpu_s: processor time of the calls.
    """

    shown: Sequence[AssertionOutcome]
    deciding: Sequence[AssertionOutcome]
    calls: Calls
    answers: Sequence[Sequence[Answer]]
    cpu_s: float


def play(kind: str, source: str, tests: Tests, *, is_solution: bool = False) -> Played:
    """Play the tests with what a program returns; a test that cannot be played with it fails.

    is_solution: that raises `CannotAsk` instead.
    """
    calls, problem = tests.calls, ""
    for _ in range(MOST_ROUNDS):
        returned = _run_calls(kind, source, calls, tests.limits)
        results = [[*map(_result, *part)] for part in zip(calls, returned, strict=True)]
        try:
            parts = _check(kind, tests, results)
        except CannotAsk as reason:
            if is_solution:
                raise
            parts, problem = [(None, []), (None, [])], str(reason)
        if all(further is None for further, _ in parts):
            break
        calls = _next_calls(calls, parts)
    else:  # its calls follow from its own results without end
        problem = Sentence("envs.code.too-many-rounds")
    answers = [[_without_additions(answer) for answer in part] for part in returned]
    outcomes = [
        [
            AssertionOutcome(holds, text, [verdict[number] for number in numbers if number < len(verdict)])
            for holds, text, numbers in part
        ]
        for verdict, (_, part) in zip(
            [[*zip(*pair, strict=False)] for pair in zip(calls, answers, strict=True)], parts, strict=True
        )
    ]
    if problem:
        outcomes[-1].append(AssertionOutcome(False, problem, ()))
    cpu_s = sum(max((answer.value[3] for answer in part if answer.error is None), default=0.0) for part in returned)
    return Played(outcomes[0], outcomes[1], calls, answers, cpu_s)


def _next_calls(calls: Calls, parts: Sequence[tuple[list[str] | None, Any]]) -> Calls:
    """Return the calls of the next round: of a part all of whose calls were known the same."""
    shown, deciding = (
        before if further is None else tuple(further) for before, (further, _) in zip(calls, parts, strict=True)
    )
    return shown, deciding


def prepare(kind: str, tests: Tests, solution: str) -> Tests:
    """Return tests with their calls, and with limits of three times what the solution needs.

    `CannotAsk` where they cannot be played, or the solution fails them.
    """
    parts = _check(kind, tests, [[], []])
    if wrong := [text for _, part in parts for holds, text, numbers in part if not (holds or numbers)]:
        raise CannotAsk("envs.code.false-assertion", expression=shortened(wrong[0]))
    if parts[1][0] is None:
        raise CannotAsk("envs.code.no-call", function=tests.function)
    tests = replace(tests, calls=_next_calls(tests.calls, parts))
    if not solution:
        return tests
    measured = replace(tests, limits=SLOW)
    test_outcome = play(kind, build_program(tests.before, solution, tests.function), measured, is_solution=True)
    if wrong := [outcome for outcome in test_outcome.deciding if not outcome.holds]:
        ends = next((answer.error for _, answer in wrong[0].calls if answer.error), "")
        raise CannotAsk("envs.code.solution-fails-test", expression=shortened(wrong[0].text), ends=ends)
    needed = math.ceil(TIMES * test_outcome.cpu_s)
    num_bytes = TIMES * sum(len(encoded(answer.value)) for part in test_outcome.answers for answer in part)
    limits = replace(
        LIMITS,
        wall_s=max(LIMITS.wall_s, 3.0 * needed),
        cpu_s=max(LIMITS.cpu_s, needed),
        memory_mb=LIMITS.memory_mb if num_bytes <= LIMITS.output_bytes else SLOW.memory_mb,
        output_bytes=max(LIMITS.output_bytes, num_bytes),
    )
    return replace(tests, calls=test_outcome.calls, limits=limits)


@lru_cache(maxsize=4096)
def _run_calls(kind: str, source: str, calls: Calls, limits: Limits) -> list[list[Answer]]:
    """Call a program for each part of the tests; return what it returned, with what the program behind it adds."""
    # In one process, as in a test: a default argument that keeps what an earlier call left in it is a mistake.
    code = source.encode(errors="replace")
    arguments = [[decoded(json.loads(call)) for call in part] for part in calls]
    reference_calls = [Call(code, RETURNED, part, in_one_process=True) for part in arguments if part]
    answers = iter(judge(kind, reference_calls, limits) if reference_calls else [])
    return [[*map(_checked, next(answers))] if part else [] for part in calls]


def _checked(answer: Answer) -> Answer:
    """Return an answer; a crash where the program has replaced what calls it."""
    is_whole = answer.error is not None or (type(answer.value) is tuple and len(answer.value) == 4)
    return answer if is_whole else Answer(error="crash")


def _without_additions(answer: Answer) -> Answer:
    return answer if answer.error is not None else Answer(answer.value[0])


def _result(call: str, answer: Answer) -> tuple[Any, ...]:
    if answer.error is not None:
        return call, list(answer.classes or ("RuntimeError", "Exception")), "", -1, None
    value, index, after, _ = answer.value
    return call, None, json.loads(encoded(value)), index, None if after is None else json.loads(encoded(after))


def _check(kind: str, tests: Tests, results: Sequence[list[Any]]) -> list[tuple[list[str] | None, list[Any]]]:
    """Play both parts with results; return of each the calls, None where all are known, and the outcomes."""
    packages = [path for name in ALLOWED if name in tests.before + tests.deciding for path in _package(name)]
    # With a seed, so that the calls are the same each time.
    before = f"{tests.before}\nimport random\nrandom.seed(0)\n" if "random" in tests.deciding else tests.before
    parts = [wrapped(part, called_name(tests.function)) for part in (tests.shown, tests.deciding)]
    decoded = json.loads(encoded(tests.given))
    source = _checker(kind, tuple(sorted({str(path.parent) for path in packages})))
    arguments = (before, [*zip(parts, results, strict=True)], called_name(tests.function), decoded)
    [[answer]] = judge(kind, [Call(source, "play", [arguments])], CHECKING, packages=packages)
    if answer.error is not None:
        raise CannotAsk("envs.code.test-ends", error=answer.error)
    problems = [problem for problem, _, _ in answer.value if problem]
    if "argument" in problems:
        raise CannotAsk("envs.code.argument-not-plain")
    if problems:
        raise CannotAsk("envs.code.loops-too-long")
    return [(calls, outcomes) for _, calls, outcomes in answer.value]


@cache
def _checker(kind: str, folders: tuple[str, ...]) -> bytes:
    """Return the checker behind a line that lets it import `values`, and packages, which interpreters start without."""
    site_packages = "{sys.prefix}/lib/python3.{sys.version_info.minor}/site-packages"
    path = [str(guest_folder()), *folders] if kind == "none" else [GUEST]
    text = (Path(__file__).parent / "guest/checker.py").read_text()
    future = "from __future__ import annotations\n"
    return f"{future}import sys\nsys.path += [*{path!r}, f'{site_packages}']\n{text.replace(future, '')}".encode()


@cache
def _package(name: str) -> list[Path]:
    """Return the folders of an installed package and of its libraries."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InfrastructureError("envs.code.package-missing", name=name)
    folder = Path(next(iter(spec.submodule_search_locations)))
    return [path for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]
