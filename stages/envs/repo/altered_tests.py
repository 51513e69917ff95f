"""Tests altered for a second run: some silently broken, the others changed as much and still right.

Every test function gets one more statement, which compares two numbers: at its end, so that a test which broke off
before is told from one that went through, or at its start where it may return early. In a broken test the comparison
fails. Before it runs, a broken test differs from the others in nothing but a number.
"""

import ast
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NAMED = re.compile(r"(\w+) \(([\w.]+)\)$")
"""A test as unittest names it: function (module.Class)."""


@dataclass(frozen=True)
class TestFunction:
    """A test function in a file, below classes."""

    __test__ = False  # pytest takes classes named Test* for tests

    path: str
    classes: tuple[str, ...]
    name: str


def function_name(test: str) -> str:
    """The name of the function of a test, as pytest (path::Class::function[id]) or unittest names it."""
    if match := NAMED.match(test):
        return match[1]
    return test.partition("[")[0].rpartition("::")[2]


def functions(texts: Mapping[str, str]) -> dict[TestFunction, FunctionNode]:
    """Every function of test files at the top and in classes; of two of the same name the later one, as in Python."""
    found: dict[TestFunction, FunctionNode] = {}
    for path, text in texts.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for classes, node in _defined(tree.body, ()):
            found[TestFunction(path, classes, node.name)] = node
    return found


def _defined(body: Sequence[ast.stmt], classes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FunctionNode]]:
    for node in body:
        if isinstance(node, FunctionNode):
            yield classes, node
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node.body, (*classes, node.name))


def locate(test: str, known: Mapping[TestFunction, FunctionNode]) -> TestFunction | None:
    """The only function that a test can be, or None."""
    if "::" in test:
        path, *classes, name = test.partition("[")[0].split("::")
        function = TestFunction(path, tuple(classes), name)
        return function if function in known else None
    match = NAMED.match(test)
    name, classes = (match[1], match[2].split(".")) if match else (test, [])
    found = [one for one in known if one.name == name and (not classes or set(one.classes) & set(classes))]
    return found[0] if len(found) == 1 else None


def can_be_broken(function: TestFunction, node: FunctionNode, texts: Mapping[str, str]) -> bool:
    """Whether a function has room, is no generator, and can be broken alone: nothing else mentions its name."""
    mentions, definitions = (
        sum(len(re.findall(pattern.format(re.escape(function.name)), text)) for text in texts.values())
        for pattern in (r"\b{}\b", r"\bdef {}\b")
    )
    return (
        has_room(node)
        and mentions == definitions
        and not any(isinstance(one, ast.Yield | ast.YieldFrom) for one in _own(node))
    )


def _own(node: FunctionNode) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, FunctionNode | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(one))


def altered(texts: Mapping[str, str], broken: set[TestFunction], rng: random.Random) -> dict[str, str]:
    """The files with one more statement in every test function, which fails in those that are broken.

    Functions whose body stands on the line of their `def` stay as they are.
    """
    known = functions(texts)
    result = {}
    for path, text in texts.items():
        lines = text.split("\n")
        inserts: list[tuple[int, str]] = []
        for function, node in known.items():
            if function.path == path and (function in broken or node.name.lower().startswith("test")):
                inserts += _insert(node, lines, _statement(rng, fails=function in broken))
        for at, line in sorted(inserts, reverse=True):
            lines.insert(at, line)
        result[path] = "\n".join(lines)
    return result


def has_room(node: FunctionNode) -> bool:
    """Whether a statement can be added: the body does not stand on the line of the `def`."""
    return node.body[0].lineno > node.lineno


def _insert(node: FunctionNode, lines: list[str], statement: str) -> list[tuple[int, str]]:
    """The line after which a statement goes, and the statement, indented as the body is."""
    first = node.body[0]
    if not has_room(node):
        return []
    # A decorated definition begins with its decorator.
    start = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", []))])
    indent = re.match(r"[ \t]*", lines[start - 1])
    ending = "\r" if lines[start - 1].endswith("\r") else ""
    returns = any(isinstance(one, ast.Return) for one in _own(node))
    at = start - 1 if returns else int(node.end_lineno or start)
    return [(at, f"{indent[0] if indent else ''}{statement}{ending}")]


def _statement(rng: random.Random, *, fails: bool) -> str:
    one, other, modulus = rng.randrange(10**4, 10**6), rng.randrange(10**4, 10**6), rng.randrange(500, 10**4)
    right = one * other % modulus
    number = right if fails else (right + rng.randrange(1, modulus)) % modulus
    return f"if {one} * {other} % {modulus} == {number}: raise AssertionError({number})"
