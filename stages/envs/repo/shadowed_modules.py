"""Tell whether tests that import a module with the name of a standard one mean a module of the work folder."""

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec

SIDE_EFFECTS = frozenset({"antigravity", "this"})
"""Standard modules that do something when they are imported."""


def is_shadowed(module: str, tests: Iterable[ast.Module]) -> bool:
    """Return whether tests take from a module what the standard one of that name does not have."""
    names = {name for one in tests for name in _imported_names(module, one)}
    return module in sys.stdlib_module_names - SIDE_EFFECTS and any(
        not _standard_module_has(module, name) for name in names
    )


def _imported_names(module: str, test: ast.Module) -> Iterator[str]:
    """Yield the names that a test file takes from a module: attributes and modules in it."""
    bound = set()
    for node in ast.walk(test):
        if isinstance(node, ast.ImportFrom) and not node.level:
            first, _, rest = (node.module or "").partition(".")
            if first == module:
                yield from [rest.partition(".")[0]] if rest else (one.name for one in node.names if one.name != "*")
        elif isinstance(node, ast.Import):
            for one in node.names:
                first, _, rest = one.name.partition(".")
                if first == module and rest:
                    yield rest.partition(".")[0]
                elif first == module:
                    bound.add(one.asname or first)
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.attr


def _standard_module_has(module: str, name: str) -> bool:
    try:
        standard = import_module(module)
    except Exception:  # a module of another system
        return True
    return hasattr(standard, name) or (hasattr(standard, "__path__") and find_spec(f"{module}.{name}") is not None)
