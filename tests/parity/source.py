"""Functions taken out of a source file: only what they need of it is executed, so that its other imports may be absent.

A name that is neither in the file nor importable stays undefined; a function that comes to use it raises NameError.
"""

import __future__

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LAZY = __future__.annotations.compiler_flag
"""Annotations stay text: the types that they name are not needed."""
Statements = dict[str, ast.stmt]


def functions(source: str, names: Iterable[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The named functions and classes of a file, those it holds; "Class.method" gives a static method.

    given: what stands for names of the file's imports. Executes upstream's code.
    """
    tree = ast.parse(source)
    there = dict(_defined(tree))
    found = [name for name in names if name in there]
    space: dict[str, Any] = {"__name__": __name__, **_imported(tree, _used(there, found)), **(given or {})}
    wanted = {id(there[name]) for name in _used(there, found) if name in there and name not in (given or {})}
    body = [statement for statement in _ordered(tree) if id(statement) in wanted]
    exec(compile(ast.Module(body, []), "upstream", "exec", LAZY, dont_inherit=True), space)
    return {name: space[name.rpartition(".")[2]] for name in found}


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Top-level functions, classes and constants, and static methods by their class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and _is_static(method):
                    method.decorator_list = []
                    yield f"{node.name}.{method.name}", method


def _is_static(method: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in method.decorator_list)


def _ordered(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from node.body


def _used(there: Statements, names: Iterable[str]) -> set[str]:
    """The names with all that they use, directly or through others."""
    used: set[str] = set()
    left = list(names)
    while left:
        if (name := left.pop()) not in used:
            used.add(name)
            left += _names(there[name]) if name in there else []
    return used


def _names(statement: ast.AST) -> list[str]:
    """What a statement reads, annotations left out."""
    found = [statement.id] if isinstance(statement, ast.Name) else []
    for field, value in ast.iter_fields(statement):
        if field not in ("annotation", "returns"):
            parts = value if isinstance(value, list) else [value]
            found += [name for part in parts if isinstance(part, ast.AST) for name in _names(part)]
    return found


def _imported(tree: ast.Module, used: set[str]) -> dict[str, Any]:
    """The file's own imports of used names, where they can be had."""
    space: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                if name in used and (module := _module(alias.name if alias.asname else name)) is not None:
                    space[name] = module
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            for alias in node.names:
                name = alias.asname or alias.name
                if name in used and hasattr(module := _module(node.module), alias.name):
                    space[name] = getattr(module, alias.name)
    return space


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
