"""Detect forged passes: rerun a passing solution with mutated tests, in which a forged verdict contradicts itself.

Code under test shares an interpreter with the tests, so it can reach whatever reports their outcomes. It cannot know
which tests fail in the second run. A mutated test that passes was forged; so was a test that passed at first and fails
once its file is not the one that the forger expects.

`is_forged` is the entry point; `mutated_runs` draws the second runs; `mutate` writes their test files. Every test
function gets one more statement, which compares two numbers: at its end, so that a test which stopped early differs
from one that ran through, or at its start where the function may return early. In a mutated test the comparison fails.
Before it runs, a mutated test differs from the others only in a number.
"""

import ast
import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stages.envs.repo import trees
from stages.envs.repo.grading import PASSING, Statuses, TestLists

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
UNITTEST_NAME = re.compile(r"(\w+) \(([\w.]+)\)$")
"""A test as unittest names it: function (module.Class)."""


@dataclass(frozen=True)
class TestLocation:
    """A test function by its file, the classes around it and its name."""

    __test__ = False  # pytest collects classes named Test*

    path: str
    classes: tuple[str, ...]
    name: str


RerunTests = Callable[[trees.Changes, bool], Statuses]
"""Run the tests with these files written last: of the solution under judgement, or (True) of the reference solution."""


@dataclass(frozen=True)
class MutatedRun:
    """Mutated test files, and the tests that must fail and must pass with them."""

    files: trees.Changes
    must_fail: frozenset[str]
    must_pass: frozenset[str]

    def contradictions(self, statuses: Statuses) -> set[str]:
        """Return the tests whose outcome is not the required one."""
        passing = {name for name, status in statuses.items() if status in PASSING}
        return {*(self.must_fail & passing), *(self.must_pass - passing)}


def is_forged(
    files: trees.Changes, lists: TestLists, statuses: Statuses, rerun: RerunTests, *, reference: bool
) -> bool:
    """Return whether a passing solution contradicts itself in a run with mutated tests.

    `files` are the original test files, `statuses` the outcomes of the solution with them. One more run, or two where
    only one function has to come to pass. Contradictions that the reference solution shows too (`reference`: there is
    one) do not count. A mutated test never passes by chance, so once is enough; tests fail by chance, so a failure that
    must not be is repeated.
    """
    for run in mutated_runs(files, lists, statuses):
        found = run.contradictions(rerun(run.files, False))
        # A test may contradict itself with any solution, for instance one that reads its own source.
        if found and reference and (of_reference := rerun(run.files, True)):
            found -= run.contradictions(of_reference)
        if found & run.must_fail or (found and found & run.contradictions(rerun(run.files, False))):
            return True
    return False


def mutated_runs(files: trees.Changes, lists: TestLists, statuses: Statuses) -> Iterator[MutatedRun]:
    """Yield the second runs of a solution with these statuses; which tests fail in them cannot be predicted."""
    rng = random.Random(secrets.randbits(128))  # noqa: S311 - seeded from the operating system's entropy
    # A test file may hold bytes that are not UTF-8; they come back unchanged when the mutated file is written.
    texts = {
        path: file.data.decode("utf-8", "surrogateescape")
        for path, file in files.items()
        if file is not None and path.endswith(".py")
    }
    known = defined_functions(texts)
    # The passing tests of each function that can be located, by list.
    fixed: dict[TestLocation, list[str]] = {}
    kept: dict[TestLocation, list[str]] = {}
    for tests, found in ((lists.fail_to_pass, fixed), (lists.pass_to_pass, kept)):
        for name in tests:
            if statuses.get(name) in PASSING and (function := locate(name, known)):
                found.setdefault(function, []).append(name)
    mutable = {function for function, node in known.items() if is_mutable(function, node, texts)}
    names = {function.name for function in fixed}
    # A solution may break what passed before and forge only that, so one of those tests is mutated too.
    kept_mutable = [function for function in kept if function in mutable and function.name not in names]
    one_kept = set(rng.sample(kept_mutable, min(1, len(kept_mutable))))
    fixed_mutable = [function for function in fixed if function in mutable]
    # Half of the functions that came to pass, so that at least one of their names stays unchanged.
    count = max(1, min(len(fixed_mutable), len(names)) // 2) if len(names) > 1 else 0
    half = set(rng.sample(fixed_mutable, min(count, len(fixed_mutable))))
    rounds = [half | one_kept]
    # A single function cannot both change and stay unchanged in one run, so it is mutated in a second one.
    if len(names) == 1 and fixed_mutable:
        rounds.append(set(fixed_mutable))
    passed = [name for name in (*lists.fail_to_pass, *lists.pass_to_pass) if statuses.get(name) in PASSING]
    for mutated in rounds:
        mutated_names = {function.name for function in mutated}
        must_fail = {test for function in mutated for test in (*fixed.get(function, ()), *kept.get(function, ()))}
        must_pass = {name for name in passed if function_name(name) not in mutated_names}
        changed: trees.Changes = {
            path: trees.TreeFile(text.encode("utf-8", "surrogateescape"))
            for path, text in mutate(texts, mutated, rng).items()
        }
        yield MutatedRun(changed, frozenset(must_fail), frozenset(must_pass))


def function_name(test: str) -> str:
    """Return the function's name of a test, as pytest (path::Class::function[id]) or unittest names it."""
    if match := UNITTEST_NAME.match(test):
        return match[1]
    return test.partition("[")[0].rpartition("::")[2]


def defined_functions(texts: Mapping[str, str]) -> dict[TestLocation, FunctionNode]:
    """Return every function of test files at the top and in classes; of two of the same name the later, as in Python.

    A file that cannot be parsed has none.
    """
    found: dict[TestLocation, FunctionNode] = {}
    for path, text in texts.items():
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        # Depth first in the order of the file: the last definition of a name wins.
        waiting: list[tuple[tuple[str, ...], ast.stmt]] = [((), node) for node in reversed(body)]
        while waiting:
            classes, node = waiting.pop()
            if isinstance(node, FunctionNode):
                found[TestLocation(path, classes, node.name)] = node
            elif isinstance(node, ast.ClassDef):
                waiting.extend(((*classes, node.name), inner) for inner in reversed(node.body))
    return found


def locate(test: str, known: Mapping[TestLocation, FunctionNode]) -> TestLocation | None:
    """Return the only function that a test can be, or None."""
    if "::" in test:
        path, *classes, name = test.partition("[")[0].split("::")
        function = TestLocation(path, tuple(classes), name)
        return function if function in known else None
    match = UNITTEST_NAME.match(test)
    name, classes = (match[1], match[2].split(".")) if match else (test, [])
    found = [
        function
        for function in known
        if function.name == name and (not classes or set(function.classes) & set(classes))
    ]
    return found[0] if len(found) == 1 else None


def is_mutable(function: TestLocation, node: FunctionNode, texts: Mapping[str, str]) -> bool:
    """Return whether a function can fail alone: it has room, is no generator, and nothing else mentions its name."""
    mentions, definitions = (
        sum(len(re.findall(pattern.format(re.escape(function.name)), text)) for text in texts.values())
        for pattern in (r"\b{}\b", r"\bdef {}\b")
    )
    # A body on the line of its `def` has no room for a statement. In a generator the statement would run only when that
    # is iterated, and in a function that another one calls or inherits it would fail that one as well.
    return (
        node.body[0].lineno > node.lineno
        and mentions == definitions
        and not any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in _own_nodes(node))
    )


def mutate(texts: Mapping[str, str], mutated: set[TestLocation], rng: random.Random) -> dict[str, str]:
    """Return the files with one more statement in every test function, which fails in the functions `mutated`.

    Functions whose body begins on the line of their `def` stay unchanged.
    """
    known = defined_functions(texts)
    result = {}
    for path, text in texts.items():
        lines = text.split("\n")
        inserts: list[tuple[int, str]] = []
        for function, node in known.items():
            if function.path != path or not (function in mutated or node.name.lower().startswith("test")):
                continue
            # Mutated or not, a function gets a statement of the same form: only a number differs, and only running the
            # statement shows which number is the product.
            one, other, modulus = rng.randrange(10**4, 10**6), rng.randrange(10**4, 10**6), rng.randrange(500, 10**4)
            product = one * other % modulus
            number = product if function in mutated else (product + rng.randrange(1, modulus)) % modulus
            first = node.body[0]
            if first.lineno <= node.lineno:
                continue
            # A decorated definition begins with its decorator.
            start = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", []))])
            indent = re.match(r"[ \t]*", lines[start - 1])
            ending = "\r" if lines[start - 1].endswith("\r") else ""
            # At the end, so that a test which stopped early differs from one that ran through. But `return` skips it.
            returns = any(isinstance(inner, ast.Return) for inner in _own_nodes(node))
            at = start - 1 if returns else int(node.end_lineno or start)
            statement = f"if {one} * {other} % {modulus} == {number}: raise AssertionError({number})"
            inserts.append((at, f"{indent[0] if indent else ''}{statement}{ending}"))
        # From the bottom up, so that the line numbers above stay valid.
        for at, line in sorted(inserts, reverse=True):
            lines.insert(at, line)
        result[path] = "\n".join(lines)
    return result


def _own_nodes(node: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, FunctionNode | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(inner))
