"""The real tests as data: what to call a solution with, and what must come back. They are compared outside the sandbox.

Understood are the forms of LeetCodeDataset (github.com/newfacade/LeetCodeDataset @ 182cd19): `candidate(...) == value`
and `is_same_list(candidate(...), list_node([...]))`, likewise for trees. A value is a literal, inf, -inf, or a node.
"""

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"
NODES = {"list_node": "is_same_list", "tree_node": "is_same_tree"}
Value = tuple[str, Any]
"""(kind, value): a plain value, or the list that a list_node or a tree_node is made from."""


@dataclass(frozen=True)
class Assertion:
    """One call of the solution and the value that it must return."""

    positional: tuple[Value, ...]
    named: dict[str, Value]
    expected: Value

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `returned` inside the sandbox is called with (programs.py)."""
        return self.expected[0], self.positional, self.named

    def holds(self, returned: Any) -> bool:
        """Whether this value, of built-in types only, equals the expected one: 2 equals 2.0, but [1] not (1,)."""
        kind, expected = self.expected
        return bool(returned == (_without_trailing_none(expected) if kind == "tree_node" else expected))


def read(statements: Sequence[str], parameters: Sequence[str] | None = None) -> list[Assertion] | None:
    """The assertions in these statements; None when one of them is of another form, or when there is none.

    `parameters` are those of the signature that a prompt gives. An assertion that calls with others is no test: no
    answer that keeps to the prompt could pass it, so one such assertion makes the statements none.
    """
    try:
        found = [_assertion(node) for text in statements for node in _asserts(text)]
        return found if found and all(_callable(one, parameters) for one in found) else None
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


def _callable(assertion: Assertion, parameters: Sequence[str] | None) -> bool:
    """Whether a function with these parameters can be called so."""
    if parameters is None:
        return True
    by_name = list(parameters)[len(assertion.positional) :]
    return len(assertion.positional) <= len(parameters) and assertion.named.keys() == set(by_name)


def _asserts(text: str) -> Iterator[ast.Assert]:
    """The assert statements of a text; those in the body of `def check(candidate):` too."""
    for node in ast.parse(text).body:
        for statement in node.body if isinstance(node, ast.FunctionDef) else [node]:
            if not isinstance(statement, ast.Assert):
                raise TypeError(ast.unparse(statement))
            yield statement


def _assertion(statement: ast.Assert) -> Assertion:
    match statement.test:
        case ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[expected]):
            return _of(call, _value(expected))
        case ast.Call(func=ast.Name(id=same), args=[ast.Call() as call, expected]):
            value = _value(expected)
            if NODES.get(value[0]) == same:
                return _of(call, value)
    raise ValueError(ast.unparse(statement))


def _of(call: ast.Call, expected: Value) -> Assertion:
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(ast.unparse(call))
    named = {keyword.arg or "": _value(keyword.value) for keyword in call.keywords}
    return Assertion(tuple(map(_value, call.args)), named, expected)


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Name(id="inf"):
            return PLAIN, math.inf
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return PLAIN, -math.inf
        case ast.Call(func=ast.Name(id=kind), args=[values]) if kind in NODES:
            return kind, ast.literal_eval(values)
    return PLAIN, ast.literal_eval(node)


def _without_trailing_none(values: list[Any]) -> list[Any]:
    kept = list(values)
    while kept and kept[-1] is None:
        kept.pop()
    return kept
