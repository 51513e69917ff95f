"""Parse test files: their functions, and the tables that give values to names (`parametrize`, loops)."""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from composer_stages.envs.repo import trees

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NAMES: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("names.toml").read_text())
"""Names of Python, pytest and unittest by what they do in a test."""
UNITTEST_NAME = re.compile(r"(\w+) \(([\w.]+)\)$")
"""The name of a test in unittest: function (module.Class)."""


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
    """Python test files: `texts` and parsed `modules` by path, and `functions`; a later one of the same name counts."""

    __test__ = False  # pytest collects classes named Test*

    def __init__(self, files: trees.Changes) -> None:
        # A test file may hold bytes that are not UTF-8; they are written back unchanged.
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
        """Return the only function that a test name of pytest or unittest can mean, or None."""
        if "::" in test:
            path, *classes, name = test.partition("[")[0].split("::")
            function = TestLocation(path, tuple(classes), name)
            return function if function in self.functions else None
        match = UNITTEST_NAME.match(test)
        name, classes = (match[1], match[2].split(".")) if match else (test, [])
        named = (function for function in self.functions if function.name == name)
        matches = [function for function in named if not classes or set(function.classes) & set(classes)]
        return matches[0] if len(matches) == 1 else None

    def owner(self, function: TestLocation) -> ast.ClassDef | None:
        """Return the class that a function is in, None at the top of a module."""
        owner, body = None, self.modules[function.path].body
        for name in function.classes:
            owner = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name][-1]
            body = owner.body
        return owner


def top_functions(module: ast.Module | ast.ClassDef | None) -> dict[str, FunctionNode]:
    """Return the functions at the top of a module or class by name."""
    return {node.name: node for node in (module.body if module else ()) if isinstance(node, FunctionNode)}


def stored_names(*nodes: ast.AST) -> list[str]:
    """Return the names that nodes bind or delete, once for each time."""
    inner = (inner for node in nodes for inner in ast.walk(node))
    return [name.id for name in inner if isinstance(name, ast.Name) and not isinstance(name.ctx, ast.Load)]


def _functions(path: str, module: ast.Module) -> Iterator[tuple[TestLocation, FunctionNode]]:
    """Yield the functions at the top and in classes, depth first in the order of the file."""
    unvisited: list[tuple[tuple[str, ...], ast.stmt]] = [((), node) for node in reversed(module.body)]
    while unvisited:
        classes, node = unvisited.pop()
        if isinstance(node, FunctionNode):
            yield TestLocation(path, classes, node.name), node
        elif isinstance(node, ast.ClassDef):
            unvisited.extend(((*classes, node.name), inner) for inner in reversed(node.body))


def body_nodes(node: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    unvisited: list[ast.AST] = list(node.body)
    while unvisited:
        inner = unvisited.pop()
        yield inner
        if not isinstance(inner, FunctionNode | ast.Lambda | ast.ClassDef):
            unvisited.extend(ast.iter_child_nodes(inner))


Cells = list[tuple[list[ast.expr], int]]
"""The cells of one column of a table: a list of expressions and the index in it."""


def columns(function: FunctionNode) -> dict[str, Cells]:
    """Return the cells of each name that a table gives values to, in `parametrize` or in a loop."""
    stored = stored_names(function)
    cells_by_name: dict[str, Cells] = {}
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or len(decorator.args) < 2:
            continue
        if getattr(decorator.func, "attr", "") != "parametrize":
            continue
        try:
            names = ast.literal_eval(decorator.args[0])
        except ValueError:
            continue
        names = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        cells_by_name.update({name: cells for name, cells in _cells(names, decorator.args[1]) if name not in stored})
    for node in body_nodes(function):
        if isinstance(node, ast.For):
            target = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            names = [getattr(element, "id", "") for element in target]
            cells_by_name.update({name: cells for name, cells in _cells(names, node.iter) if stored.count(name) == 1})
    return {name: cells for name, cells in cells_by_name.items() if cells}


def _cells(names: Sequence[str], table: ast.expr) -> Iterator[tuple[str, Cells]]:
    """Yield the cells of each name in a literal table."""
    if isinstance(table, ast.Call) and getattr(table.func, "attr", "") == "items" and len(names) == 2:
        mapping = getattr(table.func, "value", None)
        if isinstance(mapping, ast.Dict) and None not in mapping.keys:
            sides: list[list[Any]] = [mapping.keys, mapping.values]
            yield from zip(names, ([(side, index) for index in range(len(side))] for side in sides), strict=True)
    if not isinstance(table, ast.List | ast.Tuple):
        return
    rows: list[tuple[list[ast.expr], int]] = []
    for row_number, row in enumerate(table.elts):
        if isinstance(row, ast.Call) and getattr(row.func, "attr", "") == "param" and len(row.args) == len(names):
            rows.append((row.args, 0))
        elif len(names) == 1:
            rows.append((table.elts, row_number))
        elif isinstance(row, ast.Tuple | ast.List) and len(row.elts) == len(names):
            rows.append((row.elts, 0))
        else:
            return
    yield from ((name, [(values, first + index) for values, first in rows]) for index, name in enumerate(names))
