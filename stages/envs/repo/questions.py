"""Turn assertions of a test into questions: `assert f(x) == 3` asks for f(x), and 3 is not in the file.

The value that a question asks for leaves the sandbox and is compared here (guest/composer_outcomes.py: `ask`). Three
versions of a function are made: an `open` one, which sends the expected value as well and is run on trees that hold no
code of an agent; an `expecting` one, which sends the expected value twice and calls nothing for it, for tasks without a
reference solution; and a `withheld` one for the agent's code. An expected value can be withheld where no code under
test has a part in it: literals, and what built-in functions and methods of strings make of them. A local variable that
only expected values use is removed too, and a column of `parametrize` that only they use is emptied.

A question `leaks` where its expected value remains in the process all the same, for instance as an argument of the
test, or is one of very few values.
"""

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.envs.repo.rewritten_tests import (
    FunctionNode,
    own_nodes,
    parameter_values,
    parameters,
    set_value,
)

IMPORT = "from composer_questions import ask as _composer_ask"
ASK = "_composer_ask"
EQUALITY = frozenset(
    {
        *("assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual"),
        *("assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual", "eq_", "assert_equal", "assert_equals"),
    }
)
SAFE_FUNCTIONS = frozenset(
    {
        *("abs", "bool", "bytes", "chr", "dict", "divmod", "enumerate", "float", "frozenset", "int", "len", "list"),
        *("max", "min", "ord", "pow", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple"),
        "zip",
    }
)
SAFE_METHODS = frozenset(
    {
        *("join", "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "title"),
        *("capitalize", "format", "encode", "decode", "zfill", "rjust", "ljust", "center", "items", "keys", "values"),
        *("copy", "count", "index", "union", "intersection", "difference", "hex"),
    }
)
PLAIN_NODES = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred, ast.ListComp, ast.SetComp),
    *(ast.DictComp, ast.GeneratorExp),
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ASSERTING = ("assert", "raises", "warns", "fail", "check", "verify")
"""Parts of the names of functions that assert."""
GUESSED = (None, 0, 1, -1, "", b"")  # False == 0, True == 1


@dataclass(frozen=True)
class Questions:
    """The versions of one function, and by the number of each question whether it leaks.

    `alone`: the questions are all that the function asserts, as far as can be told. `steady`: no code under test
    decides whether and how often a question is reached, unless it raises.
    """

    open: FunctionNode
    expecting: FunctionNode
    withheld: FunctionNode
    leaks: Mapping[int, bool]
    alone: bool
    steady: bool


def questions(module: ast.Module, function: FunctionNode) -> Questions | None:
    """Return the questions of a function of a module; None where it has no assertion to make one of."""
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.NamedExpr) for node in ast.walk(function)):
        return None
    known = _KnownValues(module, function)
    open_ = _Rewriter(known, "open")
    version = open_.function(function)
    if not open_.expected:
        return None
    expecting, withheld = (_Rewriter(known, sends).function(function) for sends in ("expecting", "withheld"))
    leaks = {number: known.leaks(one) for number, one in enumerate(open_.expected)}
    alone = not _asserts(withheld, _asserting_names(module))
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in own_nodes(function))
    return Questions(version, expecting, withheld, leaks, alone, steady=not leaves and known.reaches(function.body))


def _asserts(function: ast.AST, names: frozenset[str]) -> bool:
    """Return whether a function may assert: by a statement, by a call of a usual name, or of one of these names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise | ast.Try):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            if name in names or any(word in name.lower() for word in ASSERTING):
                return True
    return False


def _asserting_names(module: ast.Module) -> frozenset[str]:
    """Return the names of classes, and of the functions of a module that may assert, also through each other."""
    names = {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    functions = [node for node in ast.walk(module) if isinstance(node, FunctionNode)]
    while True:
        found = frozenset(names | {one.name for one in functions if _asserts(one, frozenset(names))})
        if found <= names:
            return found
        names |= found


class _KnownValues:
    """Which expressions of a function no code under test has a part in.

    `unused` are local variables and parameters that nothing but expected values reads.
    """

    def __init__(self, module: ast.Module, function: FunctionNode) -> None:
        self.function = function
        bound = set(_bound_names(module.body))
        self._functions = SAFE_FUNCTIONS - bound if "*" not in bound else frozenset()
        self._constants = {
            node.targets[0].id
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_literal(node.value)
        }
        self.parameters = parameters(function)
        self.assigned: dict[str, ast.Assign] = {}
        stored = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not _is_load(node)]
        changed = {name for node in ast.walk(function) for name in _changed_names(node)}
        # A loop over known values gives known values.
        self._loops: dict[str, ast.expr] = {}
        self._followed: list[str] = []
        for node in own_nodes(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if stored.count(name) == 1 and name not in changed:
                    self.assigned[name] = node
            elif isinstance(node, ast.For):
                for target in ast.walk(node.target):
                    if isinstance(target, ast.Name) and stored.count(target.id) == 1 and target.id not in changed:
                        self._loops[target.id] = node.iter
        self.sites = [site for node in own_nodes(function) if (site := self.site(node))]
        self.unused = self._unused()

    def is_known(self, node: ast.AST, bound: frozenset[str] = frozenset()) -> bool:
        """Return whether no code under test has a part in the value of an expression."""
        if isinstance(node, ast.Name):
            return node.id in bound or self._is_known_name(node.id)
        if isinstance(node, COMPREHENSIONS):
            inside = bound | {
                target.id
                for generator in node.generators
                for target in ast.walk(generator.target)
                if isinstance(target, ast.Name)
            }
            parts: list[ast.AST] = [one for g in node.generators for one in (g.iter, *g.ifs)]
            parts += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return all(self.is_known(part, inside) for part in parts)
        if isinstance(node, ast.Call):
            of = node.func
            safe = (isinstance(of, ast.Name) and of.id in self._functions and of.id not in bound) or (
                isinstance(of, ast.Attribute) and of.attr in SAFE_METHODS and self.is_known(of.value, bound)
            )
            return safe and all(self.is_known(one, bound) for one in (*node.args, *(k.value for k in node.keywords)))
        if isinstance(node, PLAIN_NODES):
            children = (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))
            return all(self.is_known(child, bound) for child in children)
        return False

    def _is_known_name(self, name: str) -> bool:
        source = self.assigned[name].value if name in self.assigned else self._loops.get(name)
        if source is not None:
            # A value that is made of itself, in a loop or as the variable of a comprehension, is not known.
            if name in self._followed:
                return False
            self._followed.append(name)
            known = self.is_known(source)
            self._followed.pop()
            return known
        return name in self.parameters or (name in self._constants and name not in self._locals())

    def _locals(self) -> set[str]:
        arguments = {argument.arg for argument in ast.walk(self.function) if isinstance(argument, ast.arg)}
        return arguments | {n.id for n in ast.walk(self.function) if isinstance(n, ast.Name) and not _is_load(n)}

    def site(self, node: ast.AST) -> tuple[list[ast.expr], ast.expr] | None:
        """Return what a statement compares with a known value, and that value; None for any other statement."""
        sides: list[ast.expr] = []
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            if all(isinstance(operator, ast.Eq) for operator in node.test.ops):
                sides = [node.test.left, *node.test.comparators]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            of = node.value.func
            if (of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")) in EQUALITY:
                sides = node.value.args[:2]
        known = [side for side in sides if not isinstance(side, ast.Starred) and self.is_known(side)]
        # Literals first: a local variable that looks known may be what the test collects its results in.
        known = [side for side in known if _is_literal(side)] or (known if len(known) < len(sides) else [])
        asked = [side for side in sides if side is not (known[-1] if known else None)]
        if not known or all(_is_literal(side) for side in asked):
            return None
        return asked, known[-1]

    def reaches(self, body: Sequence[ast.stmt]) -> bool:
        """Return whether all sites of a body are reached, each as often as known values say."""
        return all(
            self.reaches(one.body)
            if isinstance(one, ast.For) and self.is_known(one.iter) and not one.orelse
            else self.site(one) is not None or not any(self.site(inner) for inner in ast.walk(one))
            for one in body
        )

    def _unused(self) -> frozenset[str]:
        """Return the names that only expected values and other unused variables read."""
        unused: set[str] = set()
        candidates = {name for name, node in self.assigned.items() if self.is_known(node.value)} | set(self.parameters)
        while True:
            inside = {id(inner) for _, expected in self.sites for inner in ast.walk(expected)}
            inside |= {id(inner) for name in unused & set(self.assigned) for inner in ast.walk(self.assigned[name])}
            body = [n for one in self.function.body for n in ast.walk(one) if isinstance(n, ast.Name) and _is_load(n)]
            read = {node.id for node in body if id(node) not in inside}
            if candidates - read == unused:
                return frozenset(unused)
            unused = candidates - read

    def leaks(self, expected: ast.expr) -> bool:
        """Return whether an expected value can be found in the process, or guessed."""
        # Its constants, with those of the variables that are removed: something is not in the process then.
        waiting, constants = [expected], 0
        while waiting:
            for node in ast.walk(waiting.pop()):
                constants += isinstance(node, ast.Constant) and node.value not in GUESSED
                if isinstance(node, ast.Name) and node.id in self.unused:
                    if node.id in self.assigned:
                        waiting.append(self.assigned[node.id].value)
                    elif self.columns(node.id):
                        constants += 1
        return constants == 0

    def columns(self, name: str) -> bool:
        """Return whether the values of a parameter can be emptied."""
        call, index, count = self.parameters[name]
        return bool(parameter_values(call.args[1], index, count))


class _Rewriter(ast.NodeTransformer):
    """Puts questions in the place of assertions; `expected` collects their expected values, by number."""

    def __init__(self, known: _KnownValues, sends: Literal["open", "expecting", "withheld"]) -> None:
        self._known, self._sends = known, sends
        self.expected: list[ast.expr] = []

    def function(self, function: FunctionNode) -> FunctionNode:
        """Return a version of the function."""
        made = copy.deepcopy(function)
        # The sites were found in the original: a copy has nodes of its own, so the originals are visited.
        made.body = [self.visit(copy.copy(node)) for node in function.body]
        if self._sends == "withheld":
            for name, (call, index, count) in parameters(made).items():
                if name in self._known.unused:
                    for row in parameter_values(call.args[1], index, count):
                        set_value(*row, ast.Constant(None))
        return ast.fix_missing_locations(made)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Return a copy with rewritten statements; functions and classes inside stay as they are."""
        if isinstance(node, FunctionNode | ast.Lambda | ast.ClassDef | ast.expr):
            return node
        return super().generic_visit(copy.copy(_with_own_lists(node)))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return the question."""
        return self._question(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Return the question of an assertion method."""
        return self._question(node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        """Return nothing of a variable that only expected values use."""
        name = getattr(node.targets[0], "id", "")
        removed = self._sends == "withheld" and name in self._known.unused and name in self._known.assigned
        return ast.Pass() if removed else node

    def _question(self, node: ast.Assert | ast.Expr) -> ast.stmt:
        site = self._known.site(node)
        if site is None:
            return node
        asked, expected = site
        number = len(self.expected)
        self.expected.append(expected)
        wanted = [expected] * len(asked)
        values = {"open": [*asked, *wanted], "expecting": [*wanted, *wanted], "withheld": asked}[self._sends]
        call = ast.Call(ast.Name(ASK, ast.Load()), [ast.Constant(number), ast.Constant(len(asked)), *values], [])
        return ast.Expr(call)


def _with_own_lists(node: ast.AST) -> ast.AST:
    """Return a shallow copy whose lists of children can be changed without changing the original's."""
    made = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(made, name, [*value])
    return made


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression holds no name."""
    return not any(isinstance(one, ast.Name | ast.Call | ast.Attribute | ast.Await) for one in ast.walk(node))


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
    """Yield the names that a module binds."""
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and not _is_load(inner):
                yield inner.id
            elif isinstance(inner, FunctionNode | ast.ClassDef):
                yield inner.name
            elif isinstance(inner, ast.alias):
                yield (inner.asname or inner.name).partition(".")[0]
