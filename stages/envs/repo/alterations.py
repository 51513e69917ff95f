"""Alter one assertion of a test: the operator, the expected value, the exception or one row of parameters.

Code that passes a test fails it with any of these alterations, if it passes because of what it does. None has a form
that original assertions do not have: an altered number is another number, an altered text differs in one letter, an
altered exception is another one of Python's. All altered versions of a function differ in the same place, so that the
original is not the one that all others resemble.
"""

import ast
import builtins
import copy
import random
import string
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from stages.envs.repo.questions import EQUALITY
from stages.envs.repo.rewritten_tests import (
    FunctionNode,
    get_value,
    own_nodes,
    parameter_values,
    parameters,
    set_value,
)

OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertEqual": "assertNotEqual",
    "assertAlmostEqual": "assertNotAlmostEqual",
}
OPPOSITES |= {value: key for key, value in OPPOSITES.items()}
ORDERED = {"assertLess": "assertGreaterEqual", "assertGreater": "assertLessEqual"}
ORDERED |= {value: key for key, value in ORDERED.items()}
NEGATED = OPPOSITES | ORDERED
OPERATORS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
OPERATORS |= {value: key for key, value in OPERATORS.items()}
RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "warns", "assertWarns", "assertWarnsRegex"})
EXCEPTIONS = (
    *("ArithmeticError", "AssertionError", "AttributeError", "BufferError", "EOFError", "FileNotFoundError"),
    *("FloatingPointError", "ImportError", "IndexError", "InterruptedError", "KeyError", "MemoryError", "NameError"),
    *("NotImplementedError", "OSError", "OverflowError", "RecursionError", "ReferenceError", "RuntimeError"),
    *("StopIteration", "SyntaxError", "TimeoutError", "TypeError", "UnicodeDecodeError", "ValueError"),
    "ZeroDivisionError",
)
WARNINGS = ("ResourceWarning", "UnicodeWarning", "BytesWarning", "ImportWarning", "SyntaxWarning", "FutureWarning")
VALUES = 8
"""Other values of one constant."""
WRITTEN_OUT = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.UnaryOp, ast.USub, ast.expr_context)
Alteration = Callable[[FunctionNode], None]
"""Alters a copy of the function that it was found in."""


def altered(function: FunctionNode, rng: random.Random, count: int) -> list[FunctionNode]:
    """Return up to `count` versions of a function that are altered in one place, drawn by `rng`.

    A place with many alternatives is preferred: which version is the original is the harder to guess.
    """
    places = [place for place in _places(function, rng) if place]
    if not places:
        return []
    rich = [place for place in places if len(place) >= count]
    place = rng.choice(rich or [place for place in places if len(place) == max(map(len, places))])
    made: dict[str, FunctionNode] = {ast.dump(function): function}
    for alteration in rng.sample(place, len(place)):
        version = copy.deepcopy(function)
        alteration(version)
        made.setdefault(ast.dump(version), ast.fix_missing_locations(version))
    return list(made.values())[1 : count + 1]


def _places(function: FunctionNode, rng: random.Random) -> Iterator[list[Alteration]]:
    """Yield the alternatives of each place where an assertion can be altered."""
    own = set(map(id, own_nodes(function)))
    for position, node in enumerate(ast.walk(function)):
        if id(node) in own:
            yield [partial(_change_at, position, change) for change in _changes(node, rng)]
    for name, (call, index, count) in parameters(function).items():
        rows = parameter_values(call.args[1], index, count) if name in _compared(function) else []
        if rows:
            number = rng.randrange(len(rows))
            yield [partial(_change_row, name, number, value) for value in others(get_value(*rows[number]), rng)]


def _change_at(position: int, change: Callable[[Any], None], version: FunctionNode) -> None:
    # By position in a walk over the tree: a deep copy has its nodes in the same order.
    change(list(ast.walk(version))[position])


def _change_row(name: str, number: int, value: ast.expr, version: FunctionNode) -> None:
    call, index, count = parameters(version)[name]
    set_value(*parameter_values(call.args[1], index, count)[number], value)


def _changes(node: ast.AST, rng: random.Random) -> list[Callable[[Any], None]]:
    """Return the changes of an assertion, or of a call of an assertion method."""
    if isinstance(node, ast.Assert):
        compare = node.test
        if isinstance(compare, ast.Compare) and all(isinstance(one, ast.Eq) for one in compare.ops):
            values = others(compare.comparators[-1], rng)
            negated = [_negate] if len(compare.ops) == 1 else []
            return [*negated, *(partial(_expect, value) for value in values)]
        return [] if isinstance(compare, ast.Compare) and len(compare.ops) > 1 else [_negate]
    if not isinstance(node, ast.Call):
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    found: list[Callable[[Any], None]] = []
    if name in EQUALITY and len(node.args) >= 2:
        # The side without a call is the expected one; the second where both or none have one.
        calls = [any(isinstance(n, ast.Call) for n in ast.walk(side)) for side in node.args[:2]]
        place = 0 if calls[1] and not calls[0] else 1
        found += (partial(_argue, place, value) for value in others(node.args[place], rng))
    if name in NEGATED and isinstance(node.func, ast.Attribute):
        found.append(lambda call: setattr(call.func, "attr", NEGATED[name]))
    if name in RAISES and node.args:
        names = WARNINGS if "arn" in name else EXCEPTIONS
        raised = {one.id for one in ast.walk(node.args[0]) if isinstance(one, ast.Name)}
        found += (partial(_argue, 0, ast.Name(other, ast.Load())) for other in names if not _related(other, raised))
    return found


def _related(name: str, others: set[str]) -> bool:
    """Return whether one of these exceptions is a subclass of the other; those that Python lacks are unknown."""
    mine = getattr(builtins, name)
    theirs = [getattr(builtins, other, Exception) for other in others]
    return any(issubclass(mine, one) or issubclass(one, mine) for one in theirs if one is not Exception)


def _negate(node: ast.Assert) -> None:
    """Negate the condition of an assertion."""
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        test.ops[0] = OPERATORS[type(test.ops[0])]()
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        node.test = test.operand
    else:
        node.test = ast.UnaryOp(ast.Not(), test)


def _expect(value: ast.expr, node: ast.Assert) -> None:
    if isinstance(node.test, ast.Compare):
        node.test.comparators[-1] = value


def _argue(place: int, value: ast.expr, call: ast.Call) -> None:
    call.args[place] = value


def others(value: ast.expr, rng: random.Random) -> list[ast.expr]:
    """Return expressions of other values: with one constant altered, or the value in a list."""
    constants = [
        at for at, node in enumerate(ast.walk(value)) if isinstance(node, ast.Constant) and _differs(node.value)
    ]
    # Constants that go into a call, an index or a product: with another one the value may be the same.
    if not constants or not all(isinstance(node, WRITTEN_OUT) for node in ast.walk(value)):
        return [ast.List([copy.deepcopy(value)], ast.Load())]
    at, made = rng.choice(constants), []
    for _ in range(VALUES):
        other = copy.deepcopy(value)
        constant = list(ast.walk(other))[at]
        if isinstance(constant, ast.Constant):
            constant.value = _another_constant(constant.value, rng)
        made.append(other)
    return made


def _differs(value: object) -> bool:
    return isinstance(value, bool | int | float | str | bytes)


def _another_constant(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-4, -3, -2, -1, 1, 2, 3, 4])
    if isinstance(value, float):
        return value + rng.choice([-2.5, -1.0, 1.0, 1.5])
    if isinstance(value, bytes):
        return value + bytes([rng.randrange(97, 123)])
    letters = [at for at, letter in enumerate(value) if letter in string.ascii_letters + string.digits]
    if not letters:
        return value + rng.choice(string.ascii_lowercase)
    at = rng.choice(letters)
    same = next(kind for kind in (string.digits, string.ascii_uppercase, string.ascii_lowercase) if value[at] in kind)
    return value[:at] + rng.choice([one for one in same if one != value[at]]) + value[at + 1 :]


def _compared(function: FunctionNode) -> set[str]:
    """Return the names that assertions compare with as they are."""
    return {
        side.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
        if isinstance(node.test.ops[0], ast.Eq)
        for side in (node.test.left, node.test.comparators[0])
        if isinstance(side, ast.Name)
    }
