"""Find the expressions of a test that no code under test has a part in, and what tells their values.

Such a value can be withheld from a sandbox with an agent's code (questions.py). What tells it is where it stands in the
test besides: a variable, a column of a table, a constant of the module, or text of any kind (`module_text`).
"""

import ast
import builtins
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from stages.envs.repo.parsed_tests import FunctionNode, body_nodes, columns

SAFE_FUNCTIONS = frozenset(
    {
        *("abs", "bool", "bytes", "chr", "dict", "divmod", "enumerate", "float", "frozenset", "int", "len", "list"),
        *("max", "min", "ord", "pow", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple"),
        *("zip", "open", "bytearray", "complex"),
    }
)
SAFE_METHODS = frozenset(
    {
        *("join", "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "title"),
        *("capitalize", "format", "encode", "decode", "zfill", "rjust", "ljust", "center", "items", "keys", "values"),
        *("copy", "count", "index", "union", "intersection", "difference", "hex", "read", "read_text", "read_bytes"),
        *("joinpath", "with_suffix", "with_name", "resolve", "absolute", "isoformat", "get", "startswith", "endswith"),
    }
)
"""Methods that change nothing."""
KNOWN_MODULES = frozenset(
    {
        *("base64", "binascii", "calendar", "cmath", "collections", "configparser", "copy", "csv", "datetime"),
        *("decimal", "enum", "fractions", "hashlib", "html", "io", "ipaddress", "itertools", "json", "math"),
        *("operator", "os.path", "pathlib", "re", "statistics", "string", "struct", "textwrap", "tomllib", "typing"),
        *("unicodedata", "urllib.parse", "zlib", "zoneinfo"),
    }
)
"""Modules of the standard library that give the same in every run."""
READING = frozenset({"open", "read", "read_text", "read_bytes", "load", "readlines"})
NOW = frozenset({"now", "today", "utcnow"})
UNCHANGING = frozenset(
    {
        *("Path", "PurePath", "Decimal", "Fraction", "date", "datetime", "time", "timedelta", "int", "str", "float"),
        *("bool", "bytes", "tuple", "frozenset", "len", "chr", "ord", "dedent", "join", "strip", "encode", "format"),
    }
)
"""What makes values that never change in place."""
PLAIN_NODES = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred),
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPARING_CALLS = frozenset(
    {
        *("any", "all", "isinstance", "issubclass", "hasattr", "callable", "bool", "filter", "startswith", "endswith"),
        *("isdigit", "isalpha", "isalnum", "isnumeric", "isspace", "isupper", "islower", "issubset", "issuperset"),
        *("isdisjoint", "count", "index", "find"),
    }
)
TRANSPARENT = frozenset({"copy", "csv", "io", "json", "os", "pathlib", "subprocess", "sys"})
"""Modules of the standard library whose functions compare nothing that they are given."""
COMPARING_PARTS = ("equal", "close", "same", "match", "compare", "cmp", "identical", "search")
"""Functions, and parts of their names, by which a test decides itself, whatever object it has got."""
GUESSED = (None, 0, 1, -1, "", b"")  # False == 0, True == 1
ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda one, other: one**other if other <= 64 else math.inf,
}
LARGEST = 1e12
"""Numbers from there on are not calculated with."""
FORMAT = re.compile(r"%[.\d]*[a-z]|\{[^{}]*\}")
"""What a text that formats others holds."""
MODULES = 256
"""Of test files, whose names are remembered: each of their tests asks for them."""


def module_text(modules: Mapping[str, ast.Module]) -> str:
    """Return what modules by path tell beside what they do: their paths, names, literals and sums of numbers."""
    parts, numbers = [path.casefold() for path in modules], set[int]()
    for node in (inner for module in modules.values() for inner in ast.walk(module)):
        if isinstance(node, ast.Constant):
            parts += [] if id(node) in numbers else [_text(node.value)]
        elif isinstance(node, ast.Call) and called_name(node).startswith("_composer_"):
            # The number of a question is none of the test's; it comes before what is asked.
            numbers.add(id(node.args[0]))
        elif isinstance(node, ast.BinOp):
            parts += [] if (value := _calculate(node)) is None else [_text(value)]
        else:
            parts += [value.casefold() for _, value in ast.iter_fields(node) if isinstance(value, str)]
    return _space_numbers("\n".join(parts))


def _calculate(node: ast.expr) -> int | float | None:
    """Return the value of an expression of numbers alone; None for any other, and where it is too large."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        one, other = _calculate(node.left), _calculate(node.right)
        with suppress(ArithmeticError):
            if one is not None and other is not None and max(abs(one), abs(other)) < LARGEST:
                value = ARITHMETIC[type(node.op)](one, other)
                return value if isinstance(value, int | float) else None
    return None


def value_texts(value: object) -> frozenset[str]:
    """Return the texts by any of which a value is told: its own, and the one that a name would have."""
    value = abs(value) if isinstance(value, int | float) else value  # the sign of -3 is an operator
    text = _space_numbers(_text(value).strip())
    return frozenset({text, _space_numbers("_".join(re.findall(r"[^\W_]+", _text(value).casefold()))) or text})


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _space_numbers(text: str) -> str:
    """Return a text with spaces around its numbers, so that 3 does not stand in 31, but in is3."""
    return re.sub(r"\d+(\.\d+)?", lambda found: f" {_short_number(found[0])} ", text)


def _short_number(text: str) -> str:
    """Return a number without the zeros that tell nothing: 7.50 is 7.5, and 750.0 is 750."""
    return (text.rstrip("0").rstrip(".") if "." in text else text).lstrip("0") or "0"


def called_name(node: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def dotted_name(node: ast.AST) -> str:
    """Return a dotted name, "" for any other expression."""
    if isinstance(node, ast.Attribute):
        above = dotted_name(node.value)
        return above and f"{above}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class KnownValues:
    """Which expressions of a test no code under test has a part in, and which names only expected values read.

    `deciding` are functions that may compare what they are given, `asserting` those of unittest that assert. `unused`
    are variables and parameters that nothing but expected values reads.
    """

    def __init__(
        self, module: ast.Module, function: FunctionNode, deciding: frozenset[str], asserting: Collection[str]
    ) -> None:
        self.function = function
        self.unused: frozenset[str] = frozenset()
        self.assigned: dict[str, ast.Assign] = {}
        self.opened: dict[str, ast.expr] = {}
        self._values: dict[str, list[ast.expr]] = {}
        self._comparing, self._asserting = deciding, asserting
        self._loops: dict[str, ast.expr] = {}
        self._followed: list[str] = []
        of_module, (known, other) = _module_names(module), _known_imports(function.body)
        self._modules = (of_module.known | known) - of_module.other - other
        local = list(_bound_names(function.body))
        self.locals = {*local, *(one.arg for one in ast.walk(function) if isinstance(one, ast.arg))} - {*self._modules}
        self._top, self._constants = of_module.bound - {*self._modules}, of_module.constants
        changed = {name for node in ast.walk(function) for name in _changed_names(node)}
        self.cells = {name: cells for name, cells in columns(function).items() if name not in changed}
        self._passed: frozenset[str] = frozenset()
        for node in body_nodes(function):
            for name, value in _bindings(node):
                self._values.setdefault(name, []).append(value)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if local.count(name) == 1 and name not in changed:
                    self.assigned[name] = node
            elif isinstance(node, ast.For):
                once = (name for name in _names(node.target) if local.count(name) == 1 and name not in changed)
                self._loops |= dict.fromkeys(once, node.iter)
            elif isinstance(node, ast.With):
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name) and local.count(item.optional_vars.id) == 1:
                        self.opened[item.optional_vars.id] = item.context_expr
        self._passed = self._find_passed_names()

    def _find_passed_names(self) -> frozenset[str]:
        """Return the names of lists and other objects that code under test gets, and may change."""
        values = {name: [*found] for name, found in self._values.items()}
        for name, cells in self.cells.items():
            values.setdefault(name, []).extend(row[place] for row, place in cells)
        for name, value in self._constants.items():
            values.setdefault(name, []).append(value)
        for name, iterated in _comprehension_bindings(self.function):
            values.setdefault(name, []).append(iterated)
        inside = {name: {one for value in found for one in _loaded_names(value)} for name, found in values.items()}
        shared: set[str] = set()
        while found := {
            name
            for name in values
            if name not in shared and (any(map(_is_changeable, values[name])) or inside[name] & shared)
        }:
            shared |= found
        calls = [node for node in ast.walk(self.function) if isinstance(node, ast.Call) and not self._is_harmless(node)]
        arguments = (part for node in calls for part in (*node.args, *(one.value for one in node.keywords)))
        handed = {name for part in arguments for name in _loaded_names(part)} & shared
        # What holds it, and what it holds, may be the same object.
        while found := {
            name for name in shared - handed if inside[name] & handed or any(name in inside[one] for one in handed)
        }:
            handed |= found
        return frozenset(handed)

    def _is_harmless(self, node: ast.Call) -> bool:
        """Return whether a call hands nothing to code under test: it is known, asserts, or is of a safe module."""
        name, root = called_name(node), dotted_name(node.func).partition(".")[0]
        return (
            self.is_known(node)
            or name in self._asserting
            or name in ("isinstance", "len", "repr", "str", "param", "approx")
            or (root in TRANSPARENT | self._modules and root not in self.locals)
        )

    def is_known(self, node: ast.AST, bound: frozenset[str] = frozenset()) -> bool:
        """Return whether no code under test has a part in the value of an expression."""
        if isinstance(node, ast.Name):
            return node.id in bound or self._is_known_name(node.id)
        if isinstance(node, ast.Attribute):
            return self.is_known(node.value, bound)
        if isinstance(node, COMPREHENSIONS):
            inside = bound | {name for one in node.generators for name in _names(one.target)}
            parts: list[ast.AST] = [one for g in node.generators for one in (g.iter, *g.ifs)]
            parts += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return all(self.is_known(part, inside) for part in parts)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id not in bound:
                name = node.func.id
                safe = name in self._modules or (name in SAFE_FUNCTIONS and self._is_known_name(name))
            else:
                known = dotted_name(node.func) == "pytest.approx" or self.is_known(node.func, bound)
                safe = known and called_name(node) not in NOW
            return safe and all(self.is_known(one, bound) for one in (*node.args, *(k.value for k in node.keywords)))
        if isinstance(node, PLAIN_NODES):
            children = (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))
            return all(self.is_known(child, bound) for child in children)
        return False

    def is_class(self, node: ast.AST) -> bool:
        """Return whether an expression names classes, of the code under test as well."""
        if isinstance(node, ast.Tuple):
            return all(map(self.is_class, node.elts))
        if isinstance(node, ast.Name) and node.id in self.cells:
            return all(self.is_class(values[place]) for values, place in self.cells[node.id])
        name = dotted_name(node)
        last = name.rpartition(".")[2].lstrip("_")
        return bool(name) and name.partition(".")[0] not in self.locals and (last[:1].isupper() or last in TYPES)

    def is_expected(self, node: ast.AST) -> bool:
        """Return whether an expression is known but for classes of the code under test that it makes objects of."""
        if isinstance(node, ast.Call) and self.is_class(node.func):
            return all(map(self.is_expected, (*node.args, *(one.value for one in node.keywords))))
        if isinstance(node, ast.Name) and node.id in self._passed:
            return False
        if isinstance(node, ast.Name) and node.id in self.cells:
            return all(self.is_expected(values[place]) for values, place in self.cells[node.id])
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self._follow(node.id, lambda: self.is_expected(self.assigned[node.id].value))
        if isinstance(node, ast.List | ast.Tuple | ast.Dict):
            return all(self.is_expected(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))
        return self.is_known(node)

    def _follow(self, name: str, then: Callable[[], bool]) -> bool:
        """Return what a name's value gives; False of one that is made of itself, in a loop or a comprehension."""
        if name in self._followed:
            return False
        self._followed.append(name)
        found = then()
        self._followed.pop()
        return found

    def _source(self, name: str) -> ast.expr | None:
        if name in self.assigned:
            return self.assigned[name].value
        return self.opened.get(name) or self._loops.get(name)

    def _is_known_name(self, name: str) -> bool:
        if name in self._passed:
            return False
        if name in self.cells:
            return all(self.is_known(values[place]) for values, place in self.cells[name])
        source = self._source(name) if name in self.locals else self._constants.get(name)
        if source is not None:
            return self._follow(name, lambda: self.is_known(source))
        if name in self.locals or name in self._top:
            return False
        return name in self._modules or name == "__file__" or (hasattr(builtins, name) and "*" not in self._top)

    def find_unused(self, expected: Sequence[ast.expr]) -> None:
        """Find the names that only expected values, and other unused variables, read."""
        unused: set[str] = set()
        candidates = {name for name, node in self.assigned.items() if self.is_expected(node.value)} | set(self.cells)
        candidates |= {name for name, source in self.opened.items() if self.is_known(source)}
        while True:
            inside = {id(inner) for one in expected for inner in ast.walk(one)}
            for name in unused:
                source = self.assigned.get(name) or self.opened.get(name)
                inside |= {id(inner) for inner in ast.walk(source)} if source else set()
            body = [n for one in self.function.body for n in ast.walk(one) if isinstance(n, ast.Name) and _is_load(n)]
            read = {node.id for node in body if id(node) not in inside}
            if candidates - read == unused:
                self.unused = frozenset(unused)
                return
            unused = candidates - read

    def removal_scope(self, node: ast.AST) -> str:
        """Return by what a part of an expression that cannot be guessed is removed.

        "test": with the test. "module": with names of the module alone. "": there is no such part.
        """
        if isinstance(node, ast.Constant):
            is_format = isinstance(node.value, str) and not any(map(str.isalnum, FORMAT.sub("", node.value)))
            return "" if node.value in GUESSED or node.value is Ellipsis or is_format else "test"
        if isinstance(node, ast.Name):
            if node.id in self.cells:
                told = [self.removal_scope(values[place]) for values, place in self.cells[node.id]]
                return max(told, default="") if node.id in self.unused else ""
            if node.id in self.locals:
                source = self._source(node.id)
                return self.removal_scope(source) if source is not None and node.id in self.unused else ""
            if node.id in self._constants:
                return "module" if self.removal_scope(self._constants[node.id]) else ""
            return "test" if node.id in self._top or node.id in TYPES or node.id[:1].isupper() else ""
        if isinstance(node, ast.Compare | ast.BoolOp | ast.Slice | ast.Lambda):
            return ""
        parts: Sequence[ast.AST]
        if isinstance(node, ast.Subscript | ast.Attribute):
            parts = [node.value]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.Call):
            # Further arguments say how something is made: int(x, 16), round(x, 2).
            parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            parts = [*parts, *node.args[: 1 if dotted_name(node.func) in SAFE_FUNCTIONS else None]]
        elif isinstance(node, COMPREHENSIONS):
            parts = [one.iter for one in node.generators]
            parts = [*parts, *([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])]
        else:
            parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return max((self.removal_scope(part) for part in parts), default="")

    def _closure(self, node: ast.AST) -> Iterator[str]:
        """Yield the names that an expression is made of, through variables that are removed."""
        waiting, seen = [node], set()
        while waiting:
            for inner in ast.walk(waiting.pop()):
                if isinstance(inner, ast.Name) and inner.id not in seen:
                    seen.add(inner.id)
                    yield inner.id
                    source = self._source(inner.id) if inner.id in self.unused else None
                    if source is None and inner.id not in self.locals:
                        source = self._constants.get(inner.id)
                    waiting += [source] if source is not None and inner.id not in self.cells else []

    def remaining_variables(self, node: ast.AST) -> set[str]:
        """Return the variables of the test that an expected value is made of and that stay."""
        inner = {name for name, _ in _comprehension_bindings(node)}
        return (self.locals & {*self._closure(node)}) - self.unused - inner

    def literal_texts(self, node: ast.AST | None) -> set[frozenset[str]]:
        """Return what tells an expression's literals, in variables and columns as well, but for the guessed."""
        found: set[frozenset[str]] = set()
        waiting, seen = [node] if node is not None else [], set()
        while waiting:
            for inner in ast.walk(waiting.pop()):
                if isinstance(inner, ast.Constant) and inner.value not in GUESSED:
                    found.add(value_texts(inner.value))
                elif isinstance(inner, ast.Name) and inner.id not in seen:
                    seen.add(inner.id)
                    waiting += [values[place] for values, place in self.cells.get(inner.id, ())]
                    waiting += [] if inner.id in self.cells else self._values.get(inner.id, [])
                    waiting += [self._constants[inner.id]] if inner.id in self._constants else []
        return found

    def reads_file(self, expected: Sequence[ast.expr]) -> bool:
        """Return whether an expected value is read from a file."""
        names = {name for one in expected for name in self._closure(one)}
        sources = [source for name in names if (source := self._source(name) or self._constants.get(name))]
        nodes = (node for one in [*expected, *sources] for node in ast.walk(one))
        return any(isinstance(node, ast.Call) and called_name(node) in READING for node in nodes)

    def constants_of(self, node: ast.AST) -> frozenset[str]:
        """Return the constants of the module that an expected value is made of."""
        return frozenset(self._closure(node)) & self._constants.keys() - self.locals

    def is_comparison(self, node: ast.AST) -> bool:
        """Return whether a test makes a value by comparing what it has got, which an object can decide."""
        if isinstance(node, ast.Compare):
            # No object decides what it is identical to.
            identity = all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
            return not identity or any(map(self.is_comparison, (node.left, *node.comparators)))
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.BinOp):
            return not self.is_known(node)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Not) or self.is_comparison(node.operand)
        if isinstance(node, ast.Call):
            return self._is_comparing_call(node)
        if isinstance(node, ast.Name):
            return self._follow(node.id, lambda: any(map(self.is_comparison, self._values.get(node.id, ()))))
        if isinstance(node, COMPREHENSIONS):
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return any(one.ifs for one in node.generators) or any(map(self.is_comparison, elements))
        if isinstance(node, ast.Constant | ast.Lambda):
            return False
        return any(self.is_comparison(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))

    def _is_comparing_call(self, node: ast.Call) -> bool:
        name, root = called_name(node), dotted_name(node.func).partition(".")[0]
        if (
            name in COMPARING_CALLS | self._comparing
            or name.startswith("__")
            or any(one in name.lower() for one in COMPARING_PARTS)
        ):
            return True
        if isinstance(node.func, ast.Name) and name in SAFE_FUNCTIONS:
            mixed = len(node.args) > 1 and any(map(self.is_known, node.args))
            return mixed or any(map(self.is_comparison, node.args))
        # A fixture, or another function of the standard library, may compare what it is given.
        if isinstance(node.func, ast.Name) and name in self.locals:
            return True
        if root in (sys.stdlib_module_names | self._modules) - TRANSPARENT - self.locals and not name[:1].isupper():
            return True
        return self.is_comparison(node.func)


TYPES = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type))


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_changeable(node: ast.expr) -> bool:
    """Return whether a value may be one that changes in place: anything but literals of other types."""
    changeable = (ast.List, ast.Dict, ast.Set, *COMPREHENSIONS)
    return any(
        isinstance(one, changeable) or (isinstance(one, ast.Call) and called_name(one) not in UNCHANGING)
        for one in ast.walk(node)
    )


def _loaded_names(node: ast.expr) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and _is_load(one))


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement binds, each with what it is bound to, or a part of."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AugAssign):
        pairs = [(node.target, ast.BinOp(node.target, node.op, node.value))]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.AsyncFor):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        pairs = [(node.optional_vars, node.context_expr)]
    for target, value in pairs:
        yield from ((name, value) for name in _names(target))


def _comprehension_bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that the comprehensions in a node bind, each with what is iterated."""
    for one in ast.walk(node):
        if isinstance(one, ast.comprehension):
            yield from ((name, one.iter) for name in _names(one.target))


def _names(node: ast.AST) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name))


@lru_cache(maxsize=MODULES)
def comparing_functions(module: ast.Module) -> frozenset[str]:
    """Return the functions of a test module, and what it imports from others beside it, that may compare values."""
    found = {
        node.name
        for node in ast.walk(module)
        if isinstance(node, FunctionNode)
        if any(isinstance(one, ast.Compare | ast.BoolOp | ast.Call) and _may_compare(one) for one in ast.walk(node))
    }
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.level or "test" in (node.module or "")):
            found.update(one.asname or one.name for one in node.names)
    return frozenset(found)


def _may_compare(node: ast.Compare | ast.BoolOp | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return called_name(node) in COMPARING_CALLS or any(one in called_name(node).lower() for one in COMPARING_PARTS)
    return True


@dataclass(frozen=True)
class _ModuleNames:
    """The names that a module binds, `known` and `other` as in _known_imports, and its constants, bound once."""

    bound: frozenset[str]
    known: frozenset[str]
    other: frozenset[str]
    constants: Mapping[str, ast.expr]


@lru_cache(maxsize=MODULES)
def _module_names(module: ast.Module) -> _ModuleNames:
    bound = list(_bound_names(module.body))
    changed = {name for node in ast.walk(module) for name in _changed_names(node)}
    constants = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if bound.count(node.targets[0].id) == 1 and node.targets[0].id not in changed
    }
    return _ModuleNames(frozenset(bound), *_known_imports(module.body), constants)


def _known_imports(body: Sequence[ast.stmt]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names bound to modules of KNOWN_MODULES, their contents and pytest.approx, and those bound to more."""
    known: set[str] = set()
    other: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                (known if name.name in KNOWN_MODULES or name.name == "os" else other).add(bound)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                inside = node.module in KNOWN_MODULES and not node.level
                safe = inside or (node.module, name.name) in (("pytest", "approx"), ("unittest.mock", "ANY"))
                (known if safe and name.name != "*" else other).add(name.asname or name.name)
        else:
            other.update(_bound_names([node]))
    return frozenset(known), frozenset(other)


def _changed_names(node: ast.AST) -> Iterator[str]:
    """Yield the names whose value a statement or a call of their own method may change."""
    targets: Sequence[ast.AST] = ()
    if isinstance(node, ast.AugAssign):
        targets = (node.target,)
    elif isinstance(node, ast.Assign | ast.Delete):
        targets = [target for target in node.targets if not isinstance(target, ast.Name)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in SAFE_METHODS:
        targets = (node.func.value,)
    for target in targets:
        while isinstance(target, ast.Subscript | ast.Attribute | ast.Starred):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind."""
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and not _is_load(inner):
                yield inner.id
            elif isinstance(inner, FunctionNode | ast.ClassDef):
                yield inner.name
            elif isinstance(inner, ast.alias):
                yield (inner.asname or inner.name).partition(".")[0]
