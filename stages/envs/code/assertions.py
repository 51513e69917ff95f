"""Assertions on a function: the calls that they make, and whether they hold for what the calls returned.

`assert f(1, [2]) == 3` is a call of f with (1, [2]), which runs in a sandbox, and the expression `answer == 3`, which
is evaluated here, outside of the candidate's process. Nothing of a row is executed by Python:
`_value` evaluates literals, arithmetic, comparisons and a table of built-in functions, and refuses anything else with
`CannotAsk`. So an assertion is either asked as its author wrote it, or its problem is left out.

In order: an assertion, the functions and operators in it, values, reading a test, values that come out of the sandbox.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_stages.errors import Refusal
from composer_stages.layout import shortened
from composer_stages.sandbox import Answer
from composer_stages.sandbox.guest.values import Foreign
from composer_stages.words import Sentence

MOST_STATEMENTS = 100_000
"""Of a test whose loops are followed."""
MOST_DIGITS = 400
LARGEST = 1_000_000
"""Elements of a list that a row may build, and bits of a number that it may raise to a power."""
MANY_ELEMENTS = 1000
"""From so many on, the elements of a set are checked for hashes that were chosen to be equal."""
RELATIVE, ABSOLUTE = 1e-7, 1e-6
"""EvalPlus' tolerances between floats, as in its tests' function `assertion` (evalplus/evalplus, tools/humaneval)."""
CLOSE = "assertion"


class CannotAsk(Refusal):
    """A test cannot be written as calls with plain arguments; the text is the reason."""


@dataclass(frozen=True, eq=False)
class CallAssertion:
    """One assertion: an expression with calls of the function under test.

    names: the variables that it reads. calls: the nodes of the calls; arguments: of each, positional and by name.
    """

    test: ast.expr
    names: Mapping[str, Any]
    calls: tuple[ast.Call, ...]
    arguments: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]

    def holds(self, answers: Sequence[Answer]) -> bool:
        """Return whether the assertion passes, given the answer of each call; it fails where a call raised."""
        if any(answer.error is not None for answer in answers):
            return False
        try:
            returned = {id(call): restore_value(answer.value) for call, answer in zip(self.calls, answers, strict=True)}
            return bool(_value(self.test, self.names, returned))
        # Any exception: the candidate chose the values, and what the expression raises fails the assertion.
        except Exception:
            return False

    def __str__(self) -> str:
        return f"assert {ast.unparse(self.test)}"


# The functions and operators. Sizes are bounded: a candidate chooses what it returns, and rows come from anywhere.


def _elements(values: Any) -> list[Any]:
    elements = list(values)
    # Integers with one hash make a set quadratic.
    if len(elements) > MANY_ELEMENTS and len(set(map(hash, elements))) < len(set(map(repr, elements))) // 2:
        raise ValueError(Sentence("envs.code.hash-collisions"))
    return elements


def _round(number: Any, digits: int = 0) -> Any:
    if abs(digits) > MOST_DIGITS:
        raise ValueError("too many digits")
    return round(number, digits) if digits else round(number)


def _range(*bounds: int) -> list[int]:
    if len(range(*bounds)) > LARGEST:
        raise CannotAsk("envs.code.range-too-long")
    return list(range(*bounds))


def _close(out: Any, expected: Any, tolerance: float) -> bool:
    """Compare as EvalPlus does: equal, or numbers of which none differs by more than the tolerance."""
    if out == expected:
        return True
    if tolerance == 0 and all(type(number) is float for number in (expected if _is_row(expected) else [expected])):
        tolerance = ABSOLUTE
    return tolerance != 0 and type(out) is type(expected) and _near(out, expected, tolerance)


def _near(out: Any, expected: Any, tolerance: float) -> bool:
    if _is_row(expected):
        return len(out) == len(expected) and all(_near(*pair, tolerance) for pair in zip(out, expected, strict=True))
    return bool(out == expected or abs(out - expected) <= tolerance + RELATIVE * abs(expected))


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)


PLAIN_FUNCTIONS = (abs, all, any, bool, complex, float, int, len, list, max, min, sorted, str, sum, tuple)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in PLAIN_FUNCTIONS},
    "set": lambda values=(): set(_elements(values)),
    "frozenset": lambda values=(): frozenset(_elements(values)),
    "round": _round,
    "isclose": math.isclose,
}
"""May be applied to what a candidate returned."""
OF_KNOWN: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "range": _range,
    "enumerate": lambda *sequences: list(enumerate(*sequences)),
    "zip": lambda *sequences: list(zip(*sequences, strict=False)),
}
"""Are applied to values of the test alone."""
NUMBERS = {name: getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
Number = int | float | complex


def _check_size(kind: ast.operator, first: Any, right: Any) -> None:
    """Raise CannotAsk for an operation whose result may be far larger than its operands, or that formats a text."""
    numbers = isinstance(first, Number) and isinstance(right, Number)
    if isinstance(kind, ast.Mod) and not numbers:
        raise CannotAsk("it formats a text")
    integers = isinstance(first, int) and isinstance(right, int)
    if isinstance(kind, ast.Pow) and integers and first.bit_length() * abs(right) > LARGEST:
        raise CannotAsk("envs.code.power-too-large")
    if isinstance(kind, ast.Mult) and not numbers:
        values, times = (right, first) if isinstance(first, int) else (first, right)
        if isinstance(times, int) and len(values) * times > LARGEST:
            raise CannotAsk("envs.code.product-too-long")


# Values.


class _Unknown:
    """Stands for the value of a variable that is assigned in a way the reader does not evaluate."""


def _function(node: ast.expr, names: Mapping[str, Any], table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if isinstance(node, ast.Name):
        if node.id == CLOSE and names.get(CLOSE) is _close:
            return _close
        if node.id in table and node.id not in names:
            return table[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "math.isclose":
        return math.isclose
    raise CannotAsk(f"it calls {_short(node)}")


def _value(node: ast.expr, names: Mapping[str, Any], returned: Mapping[int, Any]) -> Any:
    """Return the value of an expression; `returned` holds those of the calls of the function, by id of the node."""

    def value(part: ast.expr) -> Any:
        return _value(part, names, returned)

    def values(many: Sequence[ast.expr]) -> Iterator[Any]:
        for part in many:
            if isinstance(part, ast.Starred):
                yield from value(part.value)
            else:
                yield value(part)

    match node:
        case ast.Call() if id(node) in returned:
            return returned[id(node)]
        case ast.Constant(value=constant) if constant is not ...:
            return constant
        case ast.Name(id=name) if names.get(name, _Unknown) is not _Unknown:
            return names[name]
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in NUMBERS:
            return NUMBERS[name]
        case ast.Tuple(elts=elements):
            return tuple(values(elements))
        case ast.List(elts=elements):
            return list(values(elements))
        case ast.Set(elts=elements):
            return set(_elements(values(elements)))
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return {value(key): value(item) for key, item in zip(keys, items, strict=True) if key is not None}
        case ast.UnaryOp(op=kind, operand=operand) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](value(operand))
        case ast.BinOp(left=first, op=kind, right=right) if type(kind) in OPERATORS:
            pair = value(first), value(right)
            _check_size(kind, *pair)
            return OPERATORS[type(kind)](*pair)
        case ast.BoolOp(op=kind, values=parts):
            for part in parts:
                result = value(part)
                if bool(result) is isinstance(kind, ast.Or):
                    break
            return result
        case ast.Compare(left=first, ops=kinds, comparators=operands):
            right = value(first)
            for comparing, comparator in zip(kinds, operands, strict=True):
                before, right = right, value(comparator)
                if not OPERATORS[type(comparing)](before, right):
                    return False
            return True
        case ast.Subscript(value=container, slice=index) if not isinstance(index, ast.Slice):
            return value(container)[value(index)]
        case ast.Call(func=function, args=arguments, keywords=named):
            return _function(function, names, FUNCTIONS | OF_KNOWN)(*values(arguments), **_keyword_values(named, names))
    raise CannotAsk("envs.code.no-plain-value", expression=_short(node))


def _keyword_values(keywords: Sequence[ast.keyword], names: Mapping[str, Any]) -> dict[str, Any]:
    if any(keyword.arg is None for keyword in keywords):
        raise CannotAsk("envs.code.unpacks-keywords")
    return {keyword.arg or "": _value(keyword.value, names, {}) for keyword in keywords}


def _constant_value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression that does not call the function; CannotAsk where it cannot be evaluated."""
    try:
        return _value(node, names, {})
    except CannotAsk:
        raise
    except Exception as error:  # an expression of a row, which may raise anything
        raise CannotAsk(f"{_short(node)} raises {type(error).__name__}") from None


def _short(node: ast.AST) -> str:
    return shortened(" ".join(ast.unparse(node).split()))


# Reading.


def read_assertions(test: str, functions: Collection[str]) -> list[CallAssertion]:
    """Return the assertions of a test that call one of `functions`, in order.

    Followed are assertions, assignments of known values, loops over them, and the body of `def check(candidate)`. An
    assertion without a call that holds is dropped. CannotAsk for anything else, and where no assertion is left.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(test).body
        reader = _Reader(frozenset(functions))
        reader.block(body)
    except (SyntaxError, ValueError) as error:
        raise CannotAsk("envs.code.not-python", error=error) from None
    except (RecursionError, MemoryError):
        raise CannotAsk("envs.code.nested-too-deep") from None
    if not reader.assertions:
        raise CannotAsk(f"no assertion calls {' or '.join(sorted(functions))}")
    return reader.assertions


@dataclass
class _Reader:
    """Follows the statements of a test; `assertions` collects its assertions, `names` holds the variables so far."""

    functions: frozenset[str]
    names: dict[str, Any] = field(default_factory=dict)
    assertions: list[CallAssertion] = field(default_factory=list)
    followed: int = 0

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        self.followed += 1
        if self.followed > MOST_STATEMENTS:
            raise CannotAsk("envs.code.loops-too-long", most_statements=MOST_STATEMENTS)
        match node:
            case ast.Assert(test=test):
                self.assertion(test)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name == CLOSE:
                self.assertion(call)
            case ast.Expr(value=ast.Constant() | ast.Name() | ast.Call(func=ast.Name(id="check" | "print"))):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                try:
                    self.names[name] = _constant_value(value, self.names)
                except CannotAsk:
                    self.names[name] = _Unknown
            case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(arg=candidate)]), body=body):
                self.functions |= {candidate}
                self.block(body)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                of_evalplus = name == CLOSE and "allclose" in ast.unparse(node)
                self.names[name] = _close if of_evalplus else _Unknown
            case ast.Import() | ast.ImportFrom(module="math") | ast.Pass():
                pass
            case ast.ImportFrom(names=aliases):
                self.names |= dict.fromkeys((alias.asname or alias.name for alias in aliases), _Unknown)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                for value in _constant_value(ast.List([ast.Starred(over, ast.Load())], ast.Load()), self.names):
                    self.bind(target, value)
                    self.block(body)
            case _:
                raise CannotAsk("envs.code.statement-not-followed", expression=_short(node))

    def bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=parts) if isinstance(value, list | tuple) and len(parts) == len(value):
                for part, item in zip(parts, value, strict=True):
                    self.bind(part, item)
            case _:
                raise CannotAsk(f"it assigns to {_short(target)}")

    def assertion(self, test: ast.expr) -> None:
        called = (node for node in ast.walk(test) if isinstance(node, ast.Call))
        calls = tuple(call for call in called if isinstance(call.func, ast.Name) and call.func.id in self.functions)
        self.check(test, {id(call) for call in calls})
        if not calls:
            if not _constant_value(test, self.names):
                raise CannotAsk("envs.code.false-assertion", expression=_short(test))
            return
        read_names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        names = {name: value for name, value in self.names.items() if name in read_names}
        arguments = []
        for call in calls:
            positional = _constant_value(ast.Tuple(call.args, ast.Load()), names)
            arguments.append((positional, _keyword_values(call.keywords, names)))
        self.assertions.append(CallAssertion(test, names, calls, tuple(arguments)))

    def check(self, node: ast.expr, calls: Collection[int]) -> None:
        """Raise CannotAsk unless `_value` can evaluate an expression once the calls in it have returned."""
        if id(node) in calls:
            return
        if not any(id(inner) in calls for inner in ast.walk(node)):
            _constant_value(node, self.names)
            return
        match node:
            case ast.Call(func=function, keywords=keywords):
                _function(function, self.names, FUNCTIONS)
                _keyword_values(keywords, self.names)
            case ast.Compare(ops=kinds, comparators=operands):
                for kind, operand in zip(kinds, operands, strict=True):
                    if isinstance(kind, ast.Is | ast.IsNot) and getattr(operand, "value", 0) not in (None, True, False):
                        raise CannotAsk("envs.code.compares-identity", expression=_short(node))
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.UnaryOp() | ast.BinOp() | ast.BoolOp():
                pass
            case ast.Subscript(slice=index) if not isinstance(index, ast.Slice):
                pass
            case _:
                raise CannotAsk("envs.code.operation-on-result", expression=_short(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not (isinstance(node, ast.Call) and child is node.func):
                self.check(child, calls)


def make_comparisons(
    function: str, inputs: Sequence[tuple[Any, ...]], expected: Sequence[Any], tolerance: float
) -> list[CallAssertion]:
    """Return an assertion for each tuple of arguments: result and expected value, compared as by EvalPlus."""
    test = ast.parse(f"{CLOSE}({function}(*given), expected, tolerance)", mode="eval").body
    call = next(node for node in ast.walk(test) if isinstance(node, ast.Call) and ast.unparse(node.func) == function)
    names = {CLOSE: _close, "tolerance": tolerance}
    return [
        CallAssertion(test, {**names, "expected": value}, (call,), ((arguments, {}),))
        for arguments, value in zip(inputs, expected, strict=True)
    ]


# Values that come out of the sandbox. `RETURNS` is appended to a candidate's program and runs in its process.

RETURNED = "_composer_returned"
RETURNS = """

def _composer_returned(positional, named):
    return _composer_plain({function}(*positional, **named))


def _composer_plain(value):
    # Of a subclass (Counter, defaultdict, a named tuple) the value of its base, by the base's own methods: they
    # compare equal, and a subclass may lie.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, dict):
        return {{_composer_plain(key): _composer_plain(item) for key, item in dict.items(value)}}
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            parts = [_composer_plain(part) for part in base.__iter__(value)]
            return base(parts) if base in (list, tuple) else {{"__" + base.__name__ + "__": parts}}
    if isinstance(value, complex):
        return {{"__complex__": [complex.__add__(value, 0).real, complex.__add__(value, 0).imag]}}
    if isinstance(value, bytes):
        return {{"__bytes__": list(bytes.__iter__(value))}}
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, float):
        return float.__mul__(value, 1.0)
    if isinstance(value, str):
        return str.__str__(value)
    return value
"""
TAGS: dict[str, Callable[[Any], Any]] = {
    "__set__": FUNCTIONS["set"],
    "__frozenset__": FUNCTIONS["frozenset"],
    "__complex__": lambda parts: complex(*parts),
    "__bytes__": lambda parts: bytes(list(parts)),
    "__type__": lambda name: Foreign(str(name)),
}


def restore_value(value: Any) -> Any:
    """Restore a returned value from the plain form that `RETURNS` gives it."""
    if isinstance(value, list | tuple):
        return type(value)(map(restore_value, value))
    if isinstance(value, dict):
        if len(value) == 1 and (tag := next(iter(value))) in TAGS:
            try:
                return TAGS[tag](restore_value(value[tag]))
            except (TypeError, ValueError, ArithmeticError):  # a candidate may write such tags itself
                return Foreign(str(tag))
        return {restore_value(key): restore_value(item) for key, item in value.items()}
    return value


def canonical_text(value: Any) -> str:
    """Return a canonical text of a plain value: sets and dictionaries are sorted, so equal values are equal texts."""
    if isinstance(value, list):
        return f"[{', '.join(map(canonical_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return (
            f"{{{', '.join(sorted(f'{canonical_text(key)}: {canonical_text(item)}' for key, item in value.items()))}}}"
        )
    if isinstance(value, set | frozenset) and value:
        return f"{{{', '.join(sorted(map(canonical_text, value)))}}}"
    return repr(value)
