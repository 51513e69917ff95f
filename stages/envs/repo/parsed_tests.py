"""Find the functions of test files, and the tables that give values to their names."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stages.envs.repo import trees

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

    @property
    def node_id(self) -> str:
        """Return the node id of pytest, without parameters."""
        return "::".join((self.path, *self.classes, self.name))


class TestFiles:
    """Python test files: `texts` by path, `modules` as far as they can be parsed, `functions` in them.

    Of two functions of one name the later counts, as in Python.
    """

    __test__ = False  # pytest collects classes named Test*

    def __init__(self, files: trees.Changes) -> None:
        # A test file may hold bytes that are not UTF-8; they come back unchanged when the file is written.
        self.texts = {
            path: file.data.decode("utf-8", "surrogateescape")
            for path, file in files.items()
            if file is not None and path.endswith(".py")
        }
        self.modules: dict[str, ast.Module] = {}
        self.functions: dict[TestLocation, FunctionNode] = {}
        for path, text in self.texts.items():
            try:
                self.modules[path] = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            self.functions.update(_functions(path, self.modules[path]))

    def locate(self, test: str) -> TestLocation | None:
        """Return the only function that a test can be, as pytest or unittest names it, or None."""
        if "::" in test:
            path, *classes, name = test.partition("[")[0].split("::")
            function = TestLocation(path, tuple(classes), name)
            return function if function in self.functions else None
        match = UNITTEST_NAME.match(test)
        name, classes = (match[1], match[2].split(".")) if match else (test, [])
        found = [
            function
            for function in self.functions
            if function.name == name and (not classes or set(function.classes) & set(classes))
        ]
        return found[0] if len(found) == 1 else None

    def owner(self, function: TestLocation) -> ast.ClassDef | None:
        """Return the class that a function is in, None at the top of a module."""
        found, body = None, self.modules[function.path].body
        for name in function.classes:
            found = [one for one in body if isinstance(one, ast.ClassDef) and one.name == name][-1]
            body = found.body
        return found


def _functions(path: str, module: ast.Module) -> Iterator[tuple[TestLocation, FunctionNode]]:
    """Yield the functions at the top and in classes, depth first in the order of the file."""
    waiting: list[tuple[tuple[str, ...], ast.stmt]] = [((), node) for node in reversed(module.body)]
    while waiting:
        classes, node = waiting.pop()
        if isinstance(node, FunctionNode):
            yield TestLocation(path, classes, node.name), node
        elif isinstance(node, ast.ClassDef):
            waiting.extend(((*classes, node.name), inner) for inner in reversed(node.body))


def body_nodes(node: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, FunctionNode | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(inner))


Cells = list[tuple[list[ast.expr], int]]
"""The cells of one column of a table: a list of expressions, and the place in it."""


def columns(function: FunctionNode) -> dict[str, Cells]:
    """Return the cells of the names that tables give values to: those of `parametrize`, and of loops over a table."""
    stored = [one.id for one in ast.walk(function) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)]
    found: dict[str, Cells] = {}
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or len(decorator.args) < 2:
            continue
        if getattr(decorator.func, "attr", "") != "parametrize":
            continue
        try:
            names = ast.literal_eval(decorator.args[0])
        except ValueError:
            continue
        names = [one.strip() for one in names.split(",") if one.strip()] if isinstance(names, str) else list(names)
        found.update({name: cells for name, cells in _cells(names, decorator.args[1]) if name not in stored})
    for node in body_nodes(function):
        if isinstance(node, ast.For):
            target = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            names = [getattr(one, "id", "") for one in target]
            found.update({name: cells for name, cells in _cells(names, node.iter) if stored.count(name) == 1})
    return {name: cells for name, cells in found.items() if cells}


def _cells(names: Sequence[str], table: ast.expr) -> Iterator[tuple[str, Cells]]:
    """Yield the cells of each name in a table that is written out."""
    if isinstance(table, ast.Call) and getattr(table.func, "attr", "") == "items" and len(names) == 2:
        mapping = getattr(table.func, "value", None)
        if isinstance(mapping, ast.Dict) and None not in mapping.keys:
            sides: list[list[Any]] = [mapping.keys, mapping.values]
            yield from zip(names, ([(side, place) for place in range(len(side))] for side in sides), strict=True)
    if not isinstance(table, ast.List | ast.Tuple):
        return
    rows: list[tuple[list[ast.expr], int]] = []
    for place, row in enumerate(table.elts):
        if isinstance(row, ast.Call) and getattr(row.func, "attr", "") == "param" and len(row.args) == len(names):
            rows.append((row.args, 0))
        elif len(names) == 1:
            rows.append((table.elts, place))
        elif isinstance(row, ast.Tuple | ast.List) and len(row.elts) == len(names):
            rows.append((row.elts, 0))
        else:
            return
    yield from ((name, [(values, first + index) for values, first in rows]) for index, name in enumerate(names))
