"""Find the expressions of a test that do not depend on code under test, and the texts that reveal their values.

Such a value can be withheld from a sandbox with an agent's code (questions.py), unless the rest of the test reveals it:
a variable, a column of a table, a constant of the module, or text of any kind (`module_text`).
"""

import ast
import builtins
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from composer_stages.envs.repo.parsed_tests import NAMES, FunctionNode, body_nodes, columns

SAFE_FUNCTIONS, SAFE_METHODS, SAFE_MODULES, IMMUTABLE, NON_COMPARING = (
    frozenset(NAMES[key])
    for key in ("safe_functions", "safe_methods", "safe_modules", "immutable", "non_comparing_modules")
)
PLAIN_NODES = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred),
)
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
GUESSED = (None, 0, 1, -1, "", b"")  # False == 0, True == 1
ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: base**exponent if exponent <= 64 else math.inf,
}
LARGEST = 1e12
"""Limit on operands of constant expressions that are evaluated."""
FORMAT = re.compile(r"%[.\d]*[a-z]|\{[^{}]*\}")
"""A placeholder of a format string."""
MODULES = 256
"""Number of test files whose names are cached: each of their tests needs them."""
TYPES = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type))


def module_text(modules: Mapping[str, ast.Module]) -> str:
    """Return the text of modules by path: their paths, names, literals and the values of their constant expressions."""
    parts, numbers = [path.casefold() for path in modules], set[int]()
    for node in (inner for module in modules.values() for inner in ast.walk(module)):
        if isinstance(node, ast.Constant):
            parts += [] if id(node) in numbers else [_text(node.value)]
        elif isinstance(node, ast.Call) and called_name(node).startswith("_composer_"):
            # The first argument is the number of a question, which is not part of the test.
            numbers.add(id(node.args[0]))
        elif isinstance(node, ast.BinOp):
            parts += [] if (value := _calculate(node)) is None else [_text(value)]
        else:
            parts += [value.casefold() for _, value in ast.iter_fields(node) if isinstance(value, str)]
    return _space_numbers("\n".join(parts))


def _calculate(node: ast.expr) -> int | float | None:
    """Return the value of an expression of numbers; None for any other expression, and if it is too large."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        first, second = _calculate(node.left), _calculate(node.right)
        with suppress(ArithmeticError):
            if first is not None and second is not None and max(abs(first), abs(second)) < LARGEST:
                value = ARITHMETIC[type(node.op)](first, second)
                return value if isinstance(value, int | float) else None
    return None


def value_texts(value: object) -> frozenset[str]:
    """Return the texts each of which reveals a value: its own text, and its form in a name."""
    value = abs(value) if isinstance(value, int | float) else value  # the sign of -3 is an operator
    text = _space_numbers(_text(value).strip())
    return frozenset({text, _space_numbers("_".join(re.findall(r"[^\W_]+", _text(value).casefold()))) or text})


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _space_numbers(text: str) -> str:
    """Return a text with spaces around its numbers, so that 31 does not contain 3, but is3 does."""
    return re.sub(r"\d+(\.\d+)?", lambda match: f" {_short_number(match[0])} ", text)


def _short_number(text: str) -> str:
    """Return a number without redundant zeros: 7.50 is 7.5, and 750.0 is 750."""
    return (text.rstrip("0").rstrip(".") if "." in text else text).lstrip("0") or "0"


def called_name(node: ast.Call) -> str:
    """Return the last part of the name of a called function."""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def dotted_name(node: ast.AST) -> str:
    """Return a dotted name, "" for any other expression."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class KnownValues:
    """Which expressions of a test do not depend on code under test, and which names only expected values read.

    `comparing` are functions that may compare their arguments, `asserting` the assertions of unittest. `unused` are
    variables and parameters that nothing but expected values reads.
    """

    def __init__(
        self, module: ast.Module, function: FunctionNode, comparing: frozenset[str], asserting: Collection[str]
    ) -> None:
        self.function = function
        self.unused: frozenset[str] = frozenset()
        self.assigned: dict[str, ast.Assign] = {}
        self.opened: dict[str, ast.expr] = {}
        self._values: dict[str, list[ast.expr]] = {}
        self._comparing, self._asserting = comparing, asserting
        self._loops: dict[str, ast.expr] = {}
        self._followed: list[str] = []
        names, (safe_imports, other_names) = _module_names(module), _sort_imports(function.body)
        self._modules = (names.safe_imports | safe_imports) - names.other_names - other_names
        bound = list(_bound_names(function.body))
        parameters = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        self.locals = {*bound, *parameters} - {*self._modules}
        self._top, self._constants = names.bound - {*self._modules}, names.constants
        changed = {name for node in ast.walk(function) for name in _changed_names(node)}
        self.cells = {name: cells for name, cells in columns(function).items() if name not in changed}
        for node in body_nodes(function):
            for name, value in _bindings(node):
                self._values.setdefault(name, []).append(value)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if bound.count(name) == 1 and name not in changed:
                    self.assigned[name] = node
            elif isinstance(node, ast.For):
                once = (name for name in _names(node.target) if bound.count(name) == 1 and name not in changed)
                self._loops |= dict.fromkeys(once, node.iter)
            elif isinstance(node, ast.With):
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name) and bound.count(item.optional_vars.id) == 1:
                        self.opened[item.optional_vars.id] = item.context_expr
        self._passed: frozenset[str] = frozenset()
        self._passed = self._find_passed_names()

    def _find_passed_names(self) -> frozenset[str]:
        """Return the names of mutable objects that are passed to code under test."""
        values = {name: [*expressions] for name, expressions in self._values.items()}
        bindings = [(name, cell) for name in self.cells for cell in self._column(name)]
        for name, value in (*bindings, *self._constants.items(), *_comprehension_bindings(self.function)):
            values.setdefault(name, []).append(value)
        parts = {
            name: {n for value in expressions for n in _loaded_names(value)} for name, expressions in values.items()
        }
        mutable = {name for name in values if any(map(_is_mutable, values[name]))}
        while holders := {name for name in values if name not in mutable and parts[name] & mutable}:
            mutable |= holders
        calls = [node for node in ast.walk(self.function) if isinstance(node, ast.Call) and not self._is_harmless(node)]
        passed = {name for call in calls for part in _arguments(call) for name in _loaded_names(part)} & mutable
        # A container and its elements may share objects.
        while aliases := {
            name for name in mutable - passed if parts[name] & passed or any(name in parts[holder] for holder in passed)
        }:
            passed |= aliases
        return frozenset(passed)

    def _is_harmless(self, node: ast.Call) -> bool:
        """Return whether a call passes nothing to code under test: it is known, asserts, or is of a safe module."""
        name, root = called_name(node), dotted_name(node.func).partition(".")[0]
        return (
            self.is_known(node)
            or name in self._asserting
            or name in ("isinstance", "len", "repr", "str", "param", "approx")
            or (root in NON_COMPARING | self._modules and root not in self.locals)
        )

    def is_known(self, node: ast.AST, bound: frozenset[str] = frozenset()) -> bool:
        """Return whether the value of an expression does not depend on code under test."""
        if isinstance(node, ast.Name):
            return node.id in bound or self._is_known_name(node.id)
        if isinstance(node, ast.Attribute):
            return self.is_known(node.value, bound)
        if isinstance(node, Comprehension):
            inside = bound | {name for generator in node.generators for name in _names(generator.target)}
            parts = [part for generator in node.generators for part in (generator.iter, *generator.ifs)]
            return all(self.is_known(part, inside) for part in [*parts, *_elements(node)])
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id not in bound:
                name = node.func.id
                safe = name in self._modules or (name in SAFE_FUNCTIONS and self._is_known_name(name))
            else:
                is_callee_known = dotted_name(node.func) == "pytest.approx" or self.is_known(node.func, bound)
                safe = is_callee_known and called_name(node) not in NAMES["clock_readers"]
            return safe and all(self.is_known(part, bound) for part in _arguments(node))
        return isinstance(node, PLAIN_NODES) and all(self.is_known(child, bound) for child in _children(node))

    def is_class(self, node: ast.AST) -> bool:
        """Return whether an expression names classes, including those of the code under test."""
        if isinstance(node, ast.Tuple):
            return all(map(self.is_class, node.elts))
        if isinstance(node, ast.Name) and node.id in self.cells:
            return all(map(self.is_class, self._column(node.id)))
        name = dotted_name(node)
        last = name.rpartition(".")[2].lstrip("_")
        return bool(name) and name.partition(".")[0] not in self.locals and (last[:1].isupper() or last in TYPES)

    def is_expected(self, node: ast.AST) -> bool:
        """Return whether an expression is known except for classes of the code under test that it instantiates."""
        if isinstance(node, ast.Call) and self.is_class(node.func):
            return all(map(self.is_expected, _arguments(node)))
        if isinstance(node, ast.Name) and node.id in self._passed:
            return False
        if isinstance(node, ast.Name) and node.id in self.cells:
            return all(map(self.is_expected, self._column(node.id)))
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self._follow(node.id, lambda: self.is_expected(self.assigned[node.id].value))
        if isinstance(node, ast.List | ast.Tuple | ast.Dict):
            return all(map(self.is_expected, _children(node)))
        return self.is_known(node)

    def _column(self, name: str) -> list[ast.expr]:
        """Return the cells of a name that a table gives values to."""
        return [row[index] for row, index in self.cells.get(name, ())]

    def _follow(self, name: str, evaluate: Callable[[], bool]) -> bool:
        """Return the result for a name's value; False if the value depends on itself, in a loop or a comprehension."""
        if name in self._followed:
            return False
        self._followed.append(name)
        result = evaluate()
        self._followed.pop()
        return result

    def _source(self, name: str) -> ast.expr | None:
        if name in self.assigned:
            return self.assigned[name].value
        return self.opened.get(name) or self._loops.get(name)

    def _is_known_name(self, name: str) -> bool:
        if name in self._passed:
            return False
        if name in self.cells:
            return all(map(self.is_known, self._column(name)))
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
        body = [inner for statement in self.function.body for inner in ast.walk(statement)]
        while True:
            sources = [self.assigned.get(name) or self.opened.get(name) for name in unused]
            removed = {id(inner) for source in (*expected, *sources) if source for inner in ast.walk(source)}
            read = {n.id for n in body if isinstance(n, ast.Name) and _is_load(n) and id(n) not in removed}
            if candidates - read == unused:
                self.unused = frozenset(unused)
                return
            unused = candidates - read

    def removal_scope(self, node: ast.AST) -> str:
        """Return the scope with which a part of an expression that cannot be guessed is removed.

        "test": with the test. "module": only with names of the module. "": there is no such part.
        """
        if isinstance(node, ast.Constant):
            is_format = isinstance(node.value, str) and not any(map(str.isalnum, FORMAT.sub("", node.value)))
            return "" if node.value in GUESSED or node.value is Ellipsis or is_format else "test"
        if isinstance(node, ast.Name):
            if node.id in self.cells:
                scopes = map(self.removal_scope, self._column(node.id))
                return max(scopes, default="") if node.id in self.unused else ""
            if node.id in self.locals:
                source = self._source(node.id)
                return self.removal_scope(source) if source is not None and node.id in self.unused else ""
            if node.id in self._constants:
                return "module" if self.removal_scope(self._constants[node.id]) else ""
            return "test" if node.id in self._top or node.id in TYPES or node.id[:1].isupper() else ""
        if isinstance(node, ast.Compare | ast.BoolOp | ast.Slice | ast.Lambda):
            return ""
        parts: Iterable[ast.AST]
        if isinstance(node, ast.Subscript | ast.Attribute):
            parts = [node.value]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.Call):
            # Further arguments are options of the conversion: int(x, 16), round(x, 2).
            parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            parts = [*parts, *node.args[: 1 if dotted_name(node.func) in SAFE_FUNCTIONS else None]]
        elif isinstance(node, Comprehension):
            parts = [*(generator.iter for generator in node.generators), *_elements(node)]
        else:
            parts = _children(node)
        return max(map(self.removal_scope, parts), default="")

    def _closure(self, node: ast.AST) -> Iterator[str]:
        """Yield the names that an expression depends on, through variables that are removed."""
        unvisited, visited = [node], set()
        while unvisited:
            for inner in ast.walk(unvisited.pop()):
                if isinstance(inner, ast.Name) and inner.id not in visited:
                    visited.add(inner.id)
                    yield inner.id
                    source = self._source(inner.id) if inner.id in self.unused else None
                    if source is None and inner.id not in self.locals:
                        source = self._constants.get(inner.id)
                    unvisited += [source] if source is not None and inner.id not in self.cells else []

    def remaining_variables(self, node: ast.AST) -> set[str]:
        """Return the variables of the test that an expected value depends on and that the withheld version keeps."""
        inner = {name for name, _ in _comprehension_bindings(node)}
        return (self.locals & {*self._closure(node)}) - self.unused - inner

    def literal_texts(self, node: ast.AST) -> set[frozenset[str]]:
        """Return the texts that reveal each literal of an expression, its variables and columns, but guessed ones."""
        texts: set[frozenset[str]] = set()
        unvisited, visited = [node], set()
        while unvisited:
            for inner in ast.walk(unvisited.pop()):
                if isinstance(inner, ast.Constant) and inner.value not in GUESSED:
                    texts.add(value_texts(inner.value))
                elif isinstance(inner, ast.Name) and inner.id not in visited:
                    visited.add(inner.id)
                    unvisited += self._column(inner.id) if inner.id in self.cells else self._values.get(inner.id, [])
                    unvisited += [self._constants[inner.id]] if inner.id in self._constants else []
        return texts

    def reads_file(self, expected: Sequence[ast.expr]) -> bool:
        """Return whether an expected value is read from a file."""
        names = {name for value in expected for name in self._closure(value)}
        sources = [source for name in names if (source := self._source(name) or self._constants.get(name))]
        nodes = (node for value in [*expected, *sources] for node in ast.walk(value))
        return any(isinstance(node, ast.Call) and called_name(node) in NAMES["file_readers"] for node in nodes)

    def constants_of(self, node: ast.AST) -> frozenset[str]:
        """Return the constants of the module that an expected value depends on."""
        return frozenset(self._closure(node)) & self._constants.keys() - self.locals

    def is_comparison(self, node: ast.AST) -> bool:
        """Return whether the test computes a value by comparing objects of the code under test, which decide that."""
        if isinstance(node, ast.Compare):
            # No object decides its own identity.
            identity = all(isinstance(comparison, ast.Is | ast.IsNot) for comparison in node.ops)
            return not identity or any(map(self.is_comparison, (node.left, *node.comparators)))
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.BinOp):
            return not self.is_known(node)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Not) or self.is_comparison(node.operand)
        if isinstance(node, ast.Call):
            return self._is_comparing_call(node)
        if isinstance(node, ast.Name):
            return self._follow(node.id, lambda: any(map(self.is_comparison, self._values.get(node.id, ()))))
        if isinstance(node, Comprehension):
            return any(generator.ifs for generator in node.generators) or any(map(self.is_comparison, _elements(node)))
        if isinstance(node, ast.Constant | ast.Lambda):
            return False
        return any(map(self.is_comparison, _children(node)))

    def _is_comparing_call(self, node: ast.Call) -> bool:
        name, root = called_name(node), dotted_name(node.func).partition(".")[0]
        if _may_compare(node) or name in self._comparing or name.startswith("__"):
            return True
        if isinstance(node.func, ast.Name) and name in SAFE_FUNCTIONS:
            mixed = len(node.args) > 1 and any(map(self.is_known, node.args))
            return mixed or any(map(self.is_comparison, node.args))
        # A fixture, or another function of the standard library, may compare its arguments.
        if isinstance(node.func, ast.Name) and name in self.locals:
            return True
        if root in (sys.stdlib_module_names | self._modules) - NON_COMPARING - self.locals and not name[:1].isupper():
            return True
        return self.is_comparison(node.func)


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _children(node: ast.AST) -> Iterator[ast.expr]:
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _elements(node: Comprehension) -> list[ast.expr]:
    return [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]


def _is_mutable(node: ast.expr) -> bool:
    """Return whether a value may be mutable: it is or holds a container, or the result of an unknown call."""
    return any(
        isinstance(inner, ast.List | ast.Dict | ast.Set | Comprehension)
        or (isinstance(inner, ast.Call) and called_name(inner) not in IMMUTABLE)
        for inner in ast.walk(node)
    )


def _loaded_names(node: ast.expr) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and _is_load(inner))


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement binds, each with the bound expression or the one that it is a part of."""
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
    """Yield the names that the comprehensions in a node bind, each with the iterated expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.comprehension):
            yield from ((name, inner.iter) for name in _names(inner.target))


def _names(node: ast.AST) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


@lru_cache(maxsize=MODULES)
def comparing_functions(module: ast.Module) -> frozenset[str]:
    """Return the functions of a test module that may compare values, and what it imports from other test modules."""
    names = set[str]()
    for node in ast.walk(module):
        if isinstance(node, FunctionNode) and any(map(_may_compare, ast.walk(node))):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or "test" in (node.module or "")):
            names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names)


def _may_compare(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = called_name(node)
        return name in NAMES["comparing"] or any(part in name.lower() for part in NAMES["comparing_parts"])
    return isinstance(node, ast.Compare | ast.BoolOp)


@dataclass(frozen=True)
class _ModuleNames:
    """The names that a module binds, sorted as by `_sort_imports`, and its constants, bound once."""

    bound: frozenset[str]
    safe_imports: frozenset[str]
    other_names: frozenset[str]
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
    return _ModuleNames(frozenset(bound), *_sort_imports(module.body), constants)


def _sort_imports(body: Sequence[ast.stmt]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names bound to safe modules, their contents and pytest.approx, and all other bound names."""
    safe_imports: set[str] = set()
    other_names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                safe = alias.name in SAFE_MODULES or alias.name == "os"
                (safe_imports if safe else other_names).add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = node.module in SAFE_MODULES and not node.level
                safe = inside or (node.module, alias.name) in (("pytest", "approx"), ("unittest.mock", "ANY"))
                (safe_imports if safe and alias.name != "*" else other_names).add(alias.asname or alias.name)
        else:
            other_names.update(_bound_names([node]))
    return frozenset(safe_imports), frozenset(other_names)


def _changed_names(node: ast.AST) -> Iterator[str]:
    """Yield the names whose value a statement, or a call of a method of theirs, may change."""
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
