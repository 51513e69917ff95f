"""Decide whether a test that imports a module with the name of a standard one means a module of the work folder."""

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

SIDE_EFFECTS = frozenset({"antigravity", "this"})
"""Standard modules whose import has side effects."""


def is_shadowed(module: str, tests: Iterable[bytes]) -> bool:
    """Return whether tests import or read names from a module that the standard module of that name does not have."""
    names: set[str] = set()
    for test in tests:
        with suppress(SyntaxError, ValueError, RecursionError):
            names.update(_imported_names(module, ast.parse(test)))
    return module in sys.stdlib_module_names - SIDE_EFFECTS and any(not _exists(module, name) for name in names)


def _imported_names(module: str, test: ast.Module) -> Iterator[str]:
    """Yield the names that a test file takes from a module: attributes and submodules."""
    bound = set()
    for node in ast.walk(test):
        if isinstance(node, ast.ImportFrom) and not node.level:
            first, _, submodule = (node.module or "").partition(".")
            if first == module:
                names = (alias.name for alias in node.names if alias.name != "*")
                yield from [submodule.partition(".")[0]] if submodule else names
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first, _, submodule = alias.name.partition(".")
                if first == module and submodule:
                    yield submodule.partition(".")[0]
                elif first == module:
                    bound.add(alias.asname or first)
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.attr


def _exists(module: str, name: str) -> bool:
    try:
        standard = import_module(module)
    except Exception:  # a module of another system
        return True
    return hasattr(standard, name) or (hasattr(standard, "__path__") and find_spec(f"{module}.{name}") is not None)
