"""Remove from a test file all statements that the selected tests do not need: they may hold what others expect."""

import ast
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_stages.envs.repo.parsed_tests import NAMES, FunctionNode

CALLED_BY_RUNNER = frozenset(NAMES["called_by_runner"])


def prune_module(
    module: ast.Module, versions: Mapping[tuple[str, ...], FunctionNode], outside: Collection[str] = ()
) -> ast.Module:
    """Return a module with versions of some tests, by classes and name, and without all other tests.

    Functions, classes, constants and imports stay only if a test or a statement that always runs needs them, or if
    another file does: `outside` are the names that other files need.
    """
    body = _select_versions(module.body, versions, ())
    needed, selected = set(outside), set[int]()
    while new := [
        node
        for node in _definitions(body)
        if id(node) not in selected and (_is_root(node) or _defined_names(node) & needed)
    ]:
        selected |= {id(node) for node in new}
        needed |= {name for node in new for name in _mentioned_names(node)}
    return ast.fix_missing_locations(ast.Module(list(_select_statements(body, selected, needed)), []))


def mentioned_names(module: ast.Module) -> set[str]:
    """Return all names that a module reads, binds as arguments, or holds as text."""
    return {name for node in module.body for name in _mentioned_names(node, with_body=True)}


def _select_versions(
    body: list[ast.stmt], versions: Mapping[tuple[str, ...], FunctionNode], classes: tuple[str, ...]
) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for node in body:
        if isinstance(node, FunctionNode):
            version = versions.get((*classes, node.name))
            if version is not None or not node.name.startswith("test"):
                statements.append(version or node)
        elif isinstance(node, ast.ClassDef):
            class_copy: Any = copy.copy(node)
            class_copy.body = _select_versions(node.body, versions, (*classes, node.name))
            statements.append(class_copy)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            statements.append(node)
    return statements


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body)


def _is_root(node: ast.stmt) -> bool:
    """Return whether a statement runs though nothing names it."""
    if isinstance(node, FunctionNode):
        autouse = any("autouse" in ast.unparse(decorator) for decorator in node.decorator_list)
        return autouse or node.name.startswith(("test", "pytest_", "__")) or node.name in CALLED_BY_RUNNER
    if isinstance(node, ast.ClassDef):
        return any(
            isinstance(inner, FunctionNode) and inner.name.startswith("test") for inner in _definitions(node.body)
        )
    if isinstance(node, ast.Assign | ast.AnnAssign):
        names = _defined_names(node)
        return not names or bool(names & CALLED_BY_RUNNER) or any(name.startswith("__") for name in names)
    return True


def _defined_names(node: ast.stmt) -> set[str]:
    """Return the names that a definition binds; none if it does something else as well."""
    if isinstance(node, FunctionNode | ast.ClassDef):
        calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "name"]
        aliases = {value.value for value in values if isinstance(value, ast.Constant)}
        return {node.name} | {alias for alias in aliases if isinstance(alias, str)}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    elements = [e for target in targets for e in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {element.id for element in elements if isinstance(element, ast.Name)}
    return names if all(isinstance(element, ast.Name) for element in elements) else set()


def _mentioned_names(node: ast.stmt, *, with_body: bool = False) -> Iterator[str]:
    """Yield the names that a statement may need; for a class only those of its head, unless `with_body`."""
    roots: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef) and not with_body:
        roots = [*node.bases, *node.keywords, *node.decorator_list]
    for inner in (inner for root in roots for inner in ast.walk(root)):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, ast.Import | ast.ImportFrom) and with_body:
            yield from (getattr(inner, "module", "") or "").split(".")
            yield from (part for alias in inner.names for part in alias.name.split("."))
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
            yield inner.value


def _select_statements(body: list[ast.stmt], selected: set[int], needed: set[str]) -> Iterator[ast.stmt]:
    for node in body:
        if id(node) not in selected:
            continue
        statement: Any = copy.copy(node)
        if isinstance(node, ast.ClassDef):
            statement.body = list(_select_statements(node.body, selected, needed)) or [ast.Pass()]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            statement.names = [
                alias for alias in node.names if alias.name == "*" or (alias.asname or alias.name) in needed
            ]
            if not statement.names:
                continue
        yield statement
