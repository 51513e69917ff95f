"""Inline into a test the helpers that assert, the fixtures that are values, and the tables of its module.

A test that calls `check(text, expected)` holds no assertion of its own, and its expected value is an argument. With the
helper's statements in place of the call both are visible, and the file does not need the helper.
"""

import ast
import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from composer_stages.envs.repo.parsed_tests import FunctionNode, stored_names, top_functions

DEEPEST = 3
"""Limit on helpers that call helpers."""
CALLED_WITH = frozenset({"raises", "assertRaises", "warns", "assertWarns"})
"""Context managers that may take a function and its arguments instead of a block."""
SCOPED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def inline_helpers(
    module: ast.Module,
    owner: ast.ClassDef | None,
    function: FunctionNode,
    fixtures: Mapping[str, FunctionNode],
    asserting: frozenset[str],
) -> FunctionNode:
    """Return a copy of a test with the statements of its helpers; a helper that cannot be inlined stays a call.

    `fixtures` are the functions of conftest.py that the test may name, `asserting` the helpers that may assert.
    """
    test = copy.deepcopy(function)
    _write_tables(test, _tables(module))
    functions, methods = top_functions(module), top_functions(owner)
    fixtures = {**fixtures, **functions, **methods}
    shared = {argument.arg for fixture in fixtures.values() if _is_fixture(fixture) for argument in fixture.args.args}
    _write_fixtures(test, {name: fixture for name, fixture in fixtures.items() if name not in shared})
    plain = {name: node for name, node in functions.items() if not node.decorator_list}
    test.body = [_ExpressionInliner(plain).visit(statement) for statement in test.body]
    helpers = {name: node for name, node in plain.items() if name in asserting}
    methods = {name: node for name, node in methods.items() if name in asserting}
    test.body = _StatementInliner(helpers, methods, test).body(test.body, 0)
    # A message may reveal the expected value.
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            node.msg = None
    return ast.fix_missing_locations(test)


@lru_cache(maxsize=256)
def _tables(module: ast.Module) -> dict[str, ast.expr]:
    """Return the tables that a module binds once: name -> list, tuple or dict."""
    stored = stored_names(module)
    return {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if stored.count(node.targets[0].id) == 1 and isinstance(node.value, ast.List | ast.Tuple | ast.Dict)
    }


def _write_tables(function: FunctionNode, constants: Mapping[str, ast.expr]) -> None:
    """Write tables of the module, and of the function, in place of their names in `parametrize` and loops."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "parametrize":
            decorator.args = [_table(argument, constants) for argument in decorator.args]
    local = _tables(ast.Module(function.body, []))
    arguments = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
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
        value = _returned_value(fixture) if fixture and _is_plain_fixture(fixture) else None
        if value is not None:
            function.args.args.remove(argument)
            target = ast.Name(argument.arg, ast.Store())
            written.append(ast.Assign([target], copy.deepcopy(value), lineno=function.lineno))
    function.body = [*written, *function.body]


def _returned_value(function: FunctionNode) -> ast.expr | None:
    """Return the expression that a function returns if it does nothing else, None otherwise."""
    body = [statement for statement in function.body if not isinstance(statement, ast.Expr)]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


def _is_fixture(function: FunctionNode) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def _is_plain_fixture(function: FunctionNode) -> bool:
    """Return whether a function is a fixture without parameters and without options but its scope."""
    names = [argument.arg for argument in function.args.args]
    if len(function.decorator_list) != 1 or not _is_fixture(function) or names not in ([], ["self"]):
        return False
    decorator = function.decorator_list[0]
    options = {keyword.arg for keyword in decorator.keywords} if isinstance(decorator, ast.Call) else set()
    return options <= {"scope"} and not any(getattr(node, "id", "") == "self" for node in ast.walk(function))


class _StatementInliner:
    """Replaces calls of helpers by their statements, with renamed variables."""

    def __init__(
        self, helpers: Mapping[str, FunctionNode], methods: Mapping[str, FunctionNode], test: FunctionNode
    ) -> None:
        self._helpers, self._methods, self._calls = helpers, methods, 0
        self._bound = {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)} | {*stored_names(test)}

    def body(self, body: Sequence[ast.stmt], depth: int) -> list[ast.stmt]:
        """Return statements with their calls of helpers inlined."""
        return [statement for node in body for statement in self._statement(node, depth)]

    def _statement(self, node: ast.stmt, depth: int) -> list[ast.stmt]:
        if isinstance(node, ast.With | ast.AsyncWith | ast.For | ast.If):
            block: Any = copy.copy(node)
            block.body = self.body(node.body, depth)
            if isinstance(node, ast.For | ast.If):
                block.orelse = self.body(node.orelse, depth)
            return [block]
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
        on_self = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
        return self._methods.get(name) if on_self else None

    def _inline_call(self, helper: FunctionNode, call: ast.Call, target: ast.expr | None) -> list[ast.stmt] | None:
        """Return the statements of a call of a helper, None if it cannot be inlined."""
        bound = _bind_arguments(helper, call)
        last = helper.body[-1]
        inner = [node for statement in helper.body for node in ast.walk(statement)]
        returns = [node for node in inner if isinstance(node, ast.Return)]
        if (
            bound is None
            or any(isinstance(node, (*SCOPED, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom)) for node in inner)
            or any(node is not last for node in returns)
            or (target is not None and not returns)
        ):
            return None
        stored = {*stored_names(*helper.body)}
        free = {node.id for node in inner if isinstance(node, ast.Name)} - stored - bound.keys()
        # A name of the module that the helper reads may be bound in the test.
        if (free - {"self"}) & self._bound:
            return None
        self._calls += 1
        names = {name: f"_{helper.name}_{self._calls}_{name}" for name in {*stored, *bound} - {"self"}}
        statements: list[ast.stmt] = [
            ast.Assign([ast.Name(names[name], ast.Store())], value, lineno=call.lineno) for name, value in bound.items()
        ]
        copies = copy.deepcopy(helper.body)
        for node in (node for statement in copies for node in ast.walk(statement)):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
        end = copies[-1]
        if isinstance(end, ast.Return):
            value = end.value or ast.Constant(None)
            copies[-1] = ast.Expr(value) if target is None else ast.Assign([target], value, lineno=call.lineno)
        return [*statements, *copies]


def _bind_arguments(helper: FunctionNode, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the argument of each parameter of a helper, None if the call does not determine it."""
    parameters = helper.args
    if parameters.posonlyargs or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    names = [parameter.arg for parameter in parameters.args]
    if names[:1] == ["self"]:
        names = names[1:]
    further, named = call.args[len(names) :], {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    expected = {*names, *(parameter.arg for parameter in parameters.kwonlyargs)}
    options = {name: value for name, value in named.items() if name not in expected}
    if len(named) < len(call.keywords) or (further and not parameters.vararg) or (options and not parameters.kwarg):
        return None
    bound = dict(zip(names[len(names) - len(parameters.defaults) :], parameters.defaults, strict=True))
    defaults = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    bound |= {parameter.arg: value for parameter, value in defaults if value}
    bound |= dict(zip(names, call.args, strict=False))
    bound |= {name: value for name, value in named.items() if name in expected}
    if bound.keys() != expected:
        return None
    if parameters.vararg:
        bound[parameters.vararg.arg] = ast.Tuple(further, ast.Load())
    if parameters.kwarg:
        bound[parameters.kwarg.arg] = ast.Dict([ast.Constant(name) for name in options], [*options.values()])
    return bound


class _ExpressionInliner(ast.NodeTransformer):
    """Replaces calls of helpers that only return an expression by that expression."""

    def __init__(self, functions: Mapping[str, FunctionNode]) -> None:
        self._returned = {name: value for name, node in functions.items() if (value := _returned_value(node))}
        self._functions = functions

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return the expression of a helper with arguments in place of its parameters, or the call."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        bound = _bind_arguments(self._functions[name], node) if name in self._returned else None
        if bound is None:
            return node
        value = copy.deepcopy(self._returned[name])
        # Only expressions that bind no name, with arguments that may be evaluated twice.
        simple = all(isinstance(argument, ast.Constant | ast.Name) for argument in bound.values())
        if not simple or stored_names(value) or any(isinstance(inner, ast.Lambda) for inner in ast.walk(value)):
            return node
        return _Substitution(bound).visit(value)


class _Substitution(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, bound: Mapping[str, ast.expr]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression of a name, or the name if it has none."""
        return copy.deepcopy(self._bound.get(node.id, node))
