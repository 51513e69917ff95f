"""Leave out of a test file what the tests that are kept do not need: it may hold what others expect."""

import ast
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from stages.envs.repo.parsed_tests import FunctionNode

CALLED_BY_RUNNER = frozenset(
    {
        *("setup_module", "teardown_module", "setup_function", "teardown_function", "setup_method", "teardown_method"),
        *("setup_class", "teardown_class", "setUp", "tearDown", "setUpClass", "tearDownClass", "setUpModule"),
        *("tearDownModule", "asyncSetUp", "asyncTearDown", "setup", "teardown", "pytestmark", "pytest_plugins"),
        "maxDiff",
    }
)


def prune_module(
    module: ast.Module, versions: Mapping[tuple[str, ...], FunctionNode], outside: Collection[str] = ()
) -> ast.Module:
    """Return a module with versions of some tests, by classes and name, and with no other test.

    What neither they nor statements that always run name is left out: functions, classes, constants, imported names.
    `outside` are names that other files need.
    """
    body = _body(module.body, versions, ())
    wanted, kept = set(outside), set[int]()
    while True:
        new = [
            node for node in _definitions(body) if id(node) not in kept and (_is_root(node) or _names(node) & wanted)
        ]
        if not new:
            break
        kept |= {id(node) for node in new}
        wanted |= {name for node in new for name in _mentioned_names(node)}
    return ast.fix_missing_locations(ast.Module(list(_select_statements(body, kept, wanted)), []))


def mentioned_names(module: ast.Module) -> set[str]:
    """Return all names that a module reads, binds as arguments, or holds as text."""
    return {name for node in module.body for name in _mentioned_names(node, whole=True)}


def _body(
    body: list[ast.stmt], versions: Mapping[tuple[str, ...], FunctionNode], classes: tuple[str, ...]
) -> list[ast.stmt]:
    made: list[ast.stmt] = []
    for node in body:
        if isinstance(node, FunctionNode):
            version = versions.get((*classes, node.name))
            if version is not None or not _is_test(node.name):
                made.append(version or node)
        elif isinstance(node, ast.ClassDef):
            own: Any = copy.copy(node)
            own.body = _body(node.body, versions, (*classes, node.name))
            made.append(own)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            made.append(node)
    return made


def _is_test(name: str) -> bool:
    return name.startswith("test")


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body)


def _is_root(node: ast.stmt) -> bool:
    """Return whether a statement runs, or is run, though nothing names it."""
    if isinstance(node, FunctionNode):
        fixture = any("autouse" in ast.unparse(one) for one in node.decorator_list)
        return (
            _is_test(node.name) or node.name.startswith(("pytest_", "__")) or node.name in CALLED_BY_RUNNER or fixture
        )
    if isinstance(node, ast.ClassDef):
        return any(isinstance(one, FunctionNode) and _is_test(one.name) for one in _definitions(node.body))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        names = _names(node)
        return not names or bool(names & CALLED_BY_RUNNER) or any(name.startswith("__") for name in names)
    return True


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a definition gives a value to; none where it does something else as well."""
    if isinstance(node, FunctionNode | ast.ClassDef):
        given = {
            k.value.value
            for d in node.decorator_list
            if isinstance(d, ast.Call)
            for k in d.keywords
            if k.arg == "name" and isinstance(k.value, ast.Constant)
        }
        return {node.name} | {name for name in given if isinstance(name, str)}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return (
        {one.id for one in names if isinstance(one, ast.Name)} if all(isinstance(n, ast.Name) for n in names) else set()
    )


def _mentioned_names(node: ast.stmt, *, whole: bool = False) -> Iterator[str]:
    """Yield the names that a statement may need; of a class those of its own head."""
    waiting: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef) and not whole:
        waiting = [*node.bases, *node.keywords, *node.decorator_list]
    for inner in (inner for one in waiting for inner in ast.walk(one)):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, ast.Import | ast.ImportFrom) and whole:
            yield from (getattr(inner, "module", "") or "").split(".")
            yield from (part for one in inner.names for part in one.name.split("."))
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
            yield inner.value


def _select_statements(body: list[ast.stmt], kept: set[int], wanted: set[str]) -> Iterator[ast.stmt]:
    for node in body:
        if id(node) not in kept:
            continue
        made: Any = copy.copy(node)
        if isinstance(node, ast.ClassDef):
            made.body = list(_select_statements(node.body, kept, wanted)) or [ast.Pass()]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            made.names = [one for one in node.names if one.name == "*" or (one.asname or one.name) in wanted]
            if not made.names:
                continue
        yield made
