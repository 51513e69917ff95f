"""Write into a test what it takes from elsewhere: helpers that assert, fixtures that are values, tables of the module.

A test that calls `check(text, expected)` holds no assertion of its own, and its expected value is an argument. With the
helper's statements in the place of the call both can be seen, and the helper itself need not be in the file.
"""

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from stages.envs.repo.parsed_tests import FunctionNode

DEEPEST = 3
"""Helpers that call helpers."""
CALLED_WITH = frozenset({"raises", "assertRaises", "warns", "assertWarns"})
"""Guards of a block that may take a function and its arguments instead."""
SCOPED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def inline_helpers(
    module: ast.Module,
    owner: ast.ClassDef | None,
    function: FunctionNode,
    fixtures: Mapping[str, FunctionNode],
    asserting: frozenset[str],
) -> FunctionNode:
    """Return a copy of a test with the statements of its helpers; what cannot be written into it stays a call.

    `fixtures` are the functions of conftest.py that the test may name, `asserting` the helpers that may assert.
    """
    made = copy.deepcopy(function)
    constants = _constants(module)
    _write_tables(made, constants)
    fixtures = {**fixtures, **{one.name: one for one in _functions(module.body)}}
    if owner is not None:
        fixtures |= {one.name: one for one in _functions(owner.body)}
    shared = {one.arg for fixture in fixtures.values() if _is_fixture(fixture) for one in fixture.args.args}
    _write_fixtures(made, {name: one for name, one in fixtures.items() if name not in shared})
    helpers = {one.name: one for one in _functions(module.body) if one.name in asserting and not one.decorator_list}
    methods = {one.name: one for one in _functions(owner.body if owner else ()) if one.name in asserting}
    plain = {one.name: one for one in _functions(module.body) if not one.decorator_list}
    made.body = [_Expressions(plain).visit(one) for one in made.body]
    made.body = _Inliner(helpers, methods, made).body(made.body, 0)
    # A message may tell what is expected.
    for node in ast.walk(made):
        if isinstance(node, ast.Assert):
            node.msg = None
    return ast.fix_missing_locations(made)


def _functions(body: Sequence[ast.stmt]) -> Iterator[FunctionNode]:
    return (node for node in body if isinstance(node, FunctionNode))


@lru_cache(maxsize=256)
def _constants(module: ast.Module) -> dict[str, ast.expr]:
    """Return the tables that a module binds once: name -> list, tuple or dict."""
    stored = [node.id for node in ast.walk(module) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    return {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if stored.count(node.targets[0].id) == 1 and isinstance(node.value, ast.List | ast.Tuple | ast.Dict)
    }


def _write_tables(function: FunctionNode, constants: Mapping[str, ast.expr]) -> None:
    """Write tables of the module, and of the function, where parametrize and loops name them."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "parametrize":
            decorator.args = [_table(one, constants) for one in decorator.args]
    local = _constants(ast.Module(function.body, []))
    arguments = {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}
    tables = {name: value for name, value in constants.items() if name not in arguments} | local
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Attribute):
                node.iter.func.value = _table(node.iter.func.value, tables)
            else:
                node.iter = _table(node.iter, tables)


def _table(node: ast.expr, tables: Mapping[str, ast.expr]) -> ast.expr:
    return copy.deepcopy(tables[node.id]) if isinstance(node, ast.Name) and node.id in tables else node


def _write_fixtures(function: FunctionNode, fixtures: Mapping[str, FunctionNode]) -> None:
    """Write fixtures that only return an expression as variables of the test."""
    written: list[ast.stmt] = []
    for argument in list(function.args.args):
        fixture = fixtures.get(argument.arg)
        body = [one for one in fixture.body if not isinstance(one, ast.Expr)] if fixture else []
        plain = fixture is not None and _is_plain_fixture(fixture)
        if plain and len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
            function.args.args.remove(argument)
            target = ast.Name(argument.arg, ast.Store())
            written.append(ast.Assign([target], copy.deepcopy(body[0].value), lineno=function.lineno))
    function.body = [*written, *function.body]


def _is_fixture(function: FunctionNode) -> bool:
    return any("fixture" in ast.unparse(one) for one in function.decorator_list)


def _is_plain_fixture(function: FunctionNode) -> bool:
    """Return whether a function is a fixture that needs no other one and has no option but its scope."""
    names = [one.arg for one in function.args.args]
    if len(function.decorator_list) != 1 or not _is_fixture(function) or names not in ([], ["self"]):
        return False
    decorator = function.decorator_list[0]
    options = {one.arg for one in decorator.keywords} if isinstance(decorator, ast.Call) else set()
    return options <= {"scope"} and not any(getattr(node, "id", "") == "self" for node in ast.walk(function))


class _Inliner:
    """Writes the statements of helpers, under names of their own, in the place of their calls."""

    def __init__(
        self, helpers: Mapping[str, FunctionNode], methods: Mapping[str, FunctionNode], test: FunctionNode
    ) -> None:
        self._helpers, self._methods, self._calls = helpers, methods, 0
        self._bound = {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)} | {
            node.id for node in ast.walk(test) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }

    def body(self, body: Sequence[ast.stmt], depth: int) -> list[ast.stmt]:
        """Return statements with those of the helpers that they call."""
        return [made for node in body for made in self._statement(node, depth)]

    def _statement(self, node: ast.stmt, depth: int) -> list[ast.stmt]:
        if isinstance(node, ast.With | ast.AsyncWith | ast.For | ast.If):
            made: Any = copy.copy(node)
            made.body = self.body(node.body, depth)
            if isinstance(node, ast.For | ast.If):
                made.orelse = self.body(node.orelse, depth)
            return [made]
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        call = node.value if target is not None or isinstance(node, ast.Expr) else None  # type: ignore[attr-defined]
        if not isinstance(call, ast.Call):
            return [node]
        name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
        if target is None and name in CALLED_WITH and len(call.args) > 1:
            guard = ast.Call(call.func, call.args[:1], [])
            run = ast.Expr(ast.Call(call.args[1], call.args[2:], call.keywords))
            return [ast.With([ast.withitem(guard)], [run], lineno=node.lineno)]
        helper = self._helper(call, name)
        if helper is None or depth == DEEPEST:
            return [node]
        statements = self._inline_call(helper, call, target)
        return [node] if statements is None else self.body(statements, depth + 1)

    def _helper(self, call: ast.Call, name: str) -> FunctionNode | None:
        if isinstance(call.func, ast.Name):
            return self._helpers.get(name)
        is_own = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
        return self._methods.get(name) if is_own else None

    def _inline_call(self, helper: FunctionNode, call: ast.Call, target: ast.expr | None) -> list[ast.stmt] | None:
        """Return what a call of a helper does, None where that cannot be written as statements."""
        bound = _bind_arguments(helper, call)
        last = helper.body[-1]
        inner = [node for one in helper.body for node in ast.walk(one)]
        returns = [node for node in inner if isinstance(node, ast.Return)]
        if (
            bound is None
            or any(isinstance(node, (*SCOPED, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom)) for node in inner)
            or any(one is not last for one in returns)
            or (target is not None and not returns)
        ):
            return None
        stored = {node.id for node in inner if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        free = {node.id for node in inner if isinstance(node, ast.Name)} - stored - bound.keys()
        # A name that the helper takes from the module may be another one in the test.
        if (free - {"self"}) & self._bound:
            return None
        self._calls += 1
        names = {name: f"_{helper.name}_{self._calls}_{name}" for name in {*stored, *bound} - {"self"}}
        made: list[ast.stmt] = [
            ast.Assign([ast.Name(names[name], ast.Store())], value, lineno=call.lineno) for name, value in bound.items()
        ]
        copies = copy.deepcopy(helper.body)
        for node in (node for one in copies for node in ast.walk(one)):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
        end = copies[-1]
        if isinstance(end, ast.Return):
            value = end.value or ast.Constant(None)
            copies[-1] = ast.Expr(value) if target is None else ast.Assign([target], value, lineno=call.lineno)
        return [*made, *copies]


def _bind_arguments(helper: FunctionNode, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the argument of each parameter of a helper, None where that is not written out."""
    given = helper.args
    if given.posonlyargs or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    names = [one.arg for one in given.args]
    if names[:1] == ["self"]:
        names = names[1:]
    further, named = call.args[len(names) :], {one.arg: one.value for one in call.keywords if one.arg}
    wanted = {*names, *(one.arg for one in given.kwonlyargs)}
    options = {name: value for name, value in named.items() if name not in wanted}
    if len(named) < len(call.keywords) or (further and not given.vararg) or (options and not given.kwarg):
        return None
    bound = dict(zip(names[len(names) - len(given.defaults) :], given.defaults, strict=True))
    bound |= {one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value}
    bound |= dict(zip(names, call.args, strict=False))
    bound |= {name: value for name, value in named.items() if name in wanted}
    if bound.keys() != wanted:
        return None
    if given.vararg:
        bound[given.vararg.arg] = ast.Tuple(further, ast.Load())
    if given.kwarg:
        bound[given.kwarg.arg] = ast.Dict([ast.Constant(name) for name in options], [*options.values()])
    return bound


class _Expressions(ast.NodeTransformer):
    """Writes helpers that only return an expression in the place of their calls."""

    def __init__(self, functions: Mapping[str, FunctionNode]) -> None:
        self._returned = {
            name: body[0].value
            for name, one in functions.items()
            if len(body := [node for node in one.body if not isinstance(node, ast.Expr)]) == 1
            if isinstance(body[0], ast.Return) and body[0].value is not None
        }
        self._functions = functions

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return what a helper returns, its arguments in the place of its parameters."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        bound = _bind_arguments(self._functions[name], node) if name in self._returned else None
        if bound is None:
            return node
        value = copy.deepcopy(self._returned[name])
        inner = [one for one in ast.walk(value) if isinstance(one, ast.Name)]
        # Only what no other value is made of in the helper, and what may be written twice.
        if any(not isinstance(one.ctx, ast.Load) for one in inner) or any(
            isinstance(one, ast.Lambda) for one in ast.walk(value)
        ):
            return node
        if not all(isinstance(one, ast.Constant | ast.Name) for one in bound.values()):
            return node
        return _Substitution(bound).visit(value)


class _Substitution(ast.NodeTransformer):
    """Writes expressions in the place of names."""

    def __init__(self, bound: Mapping[str, ast.expr]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression of a name, or the name."""
        return copy.deepcopy(self._bound.get(node.id, node))
