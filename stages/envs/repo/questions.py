"""Turn the assertions of a test into questions: `assert f(x) == 3` asks for f(x), and 3 is in no file of the sandbox.

The value that a question asks for leaves the sandbox (guest/composer_outcomes.py: `ask`) and is compared outside
(values.py). A test is rewritten to three versions: an `open` one, which sends the expected value as well and runs on
trees without an agent's code; an `expecting` one, which sends the expected value alone, for tasks without a reference
solution; and a `withheld` one for the agent's code, without anything that only expected values need: variables, columns
of `parametrize` and of loop tables, constants, fixtures and imports of the module.

An expected value can be withheld if it does not depend on code under test. A test is rewritten only if all of its
assertions become questions, their number depends on known values alone, and nothing that remains reveals an expected
value. `NotAskable` gives the reason otherwise.
"""

import ast
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from composer_stages.envs.repo.inlining import inline_helpers
from composer_stages.envs.repo.known_values import MODULES, KnownValues, called_name, comparing_functions, dotted_name
from composer_stages.envs.repo.parsed_tests import NAMES, FunctionNode, columns, top_functions
from composer_stages.words import Sentence

IMPORT = "from composer_questions import ask as _composer_ask, caught as _composer_caught, warned as _composer_warned"
ASK = "_composer_ask"
ASSERTIONS, GUARDS, OPERATORS, RELATIONS = (NAMES[key] for key in ("assertions", "guards", "operators", "relations"))
Sends = Literal["open", "expecting", "withheld"]
SENDS: tuple[Sends, ...] = ("open", "expecting", "withheld")
Condition = tuple[str, ast.expr, ast.expr]
"""A relation, the value that is asked for and the expected one."""


class NotAskable(Exception):
    """Not all assertions of a test can become questions; `reason` says why."""

    def __init__(self, reason: str, /, **values: Any) -> None:
        self.reason = reason if isinstance(reason, Sentence) else Sentence(reason, **values)
        super().__init__(self.reason)


@dataclass(frozen=True)
class ValueQuestion:
    """One question; `value` is None for a guard, a context manager that asserts what its block raises."""

    number: int
    relation: str
    value: ast.expr | None
    expected: ast.expr


@dataclass(frozen=True)
class RewrittenTest:
    """The versions of one test.

    `relations`: the relation of each question's value to the expected value. `absent_names`: names of the module that
    no withheld version may hold. `reads_file`: whether an expected value is read from a file. `expected_texts`: for
    each expected value, the texts that reveal each of its literals.
    """

    open: FunctionNode
    expecting: FunctionNode
    withheld: FunctionNode
    relations: tuple[str, ...]
    absent_names: frozenset[str]
    reads_file: bool
    expected_texts: tuple[frozenset[frozenset[str]], ...]

    def is_revealed_by(self, module_text: str) -> bool:
        """Return whether the text of the withheld modules reveals all expected values."""
        literals = [texts for expected in self.expected_texts for texts in expected]
        return bool(literals) and all(any(text in module_text for text in texts) for texts in literals)


def rewrite_test(
    module: ast.Module,
    owner: ast.ClassDef | None,
    function: FunctionNode,
    fixtures: Mapping[str, FunctionNode],
    test_modules: Mapping[str, ast.Module] = MappingProxyType({}),
) -> RewrittenTest:
    """Return the versions of a test function of a module, or of its class; `NotAskable` with the reason if it has none.

    `fixtures` are the functions of conftest.py that the test may name, `test_modules` the modules of all test files by
    name.
    """
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.NamedExpr | ast.Yield) for node in ast.walk(function)):
        raise NotAskable("envs.repo.binds-names")
    helpers = _imported_helpers(module, test_modules)
    asserting = asserting_names(module) | {n for n, (name, file) in helpers.items() if name in asserting_names(file)}
    comparing = {n for n, (name, file) in helpers.items() if name in comparing_functions(file)}
    functions = [*fixtures.values(), *top_functions(module).values(), *top_functions(owner).values()]
    marks = [*function.decorator_list, *(owner.decorator_list if owner else ())]
    marks += [node for node in module.body if isinstance(node, ast.Assign)]
    for node in _surrounding_functions(functions, marks, function):
        if assertion := _find_assertion(node, asserting):
            raise NotAskable("envs.repo.uses-asserting-function", name=node.name, assertion=_describe(assertion))
    for decorator in function.decorator_list:
        if assertion := _find_assertion(decorator, asserting):
            raise NotAskable("envs.repo.asserting-decorator", assertion=_describe(assertion))
    test = inline_helpers(module, owner, function, fixtures, asserting)
    comparing |= comparing_functions(module) | asserting
    values = KnownValues(module, test, frozenset(comparing), {*ASSERTIONS, *RELATIONS})
    assertions = _Assertions(values, asserting)
    assertions.collect(test.body)
    if not assertions.questions:
        raise NotAskable("envs.repo.no-asserted-value")
    expected = [question.expected for question in assertions.questions]
    values.find_unused(expected)
    absent = frozenset(name for question in assertions.questions for name in _absent_constants(values, question))
    versions: dict[str, FunctionNode] = {kind: _Rewriter(values, assertions, kind).version_of(test) for kind in SENDS}
    return RewrittenTest(
        **versions,
        relations=tuple(question.relation for question in assertions.questions),
        absent_names=absent,
        reads_file=values.reads_file(expected),
        expected_texts=tuple(frozenset(values.literal_texts(value)) for value in expected),
    )


def _absent_constants(values: KnownValues, question: ValueQuestion) -> frozenset[str]:
    """Return the constants of the module that alone could reveal a question's expected value.

    `NotAskable` if the rest of the test reveals the value, or compares it.
    """
    value, expected = question.value, question.expected
    scope = values.removal_scope(expected)
    # A result that the test compares itself could be decided by an object with operators of its own. If an operand is
    # an expected value as well, such an object would only have to return the other operand.
    if value is not None and values.is_comparison(value):
        disjoint = values.literal_texts(expected).isdisjoint(values.literal_texts(value))
        if question.relation != "==" or not scope or not disjoint:
            raise NotAskable("envs.repo.decides-itself", expression=_shorten(value))
    remaining = sorted(values.remaining_variables(expected))
    if not scope and remaining:
        raise NotAskable("envs.repo.holds-expected-value", name=remaining[0])
    return frozenset() if scope == "test" else values.constants_of(expected)


def _surrounding_functions(
    functions: Sequence[FunctionNode], marks: Sequence[ast.AST], test: FunctionNode
) -> Iterator[FunctionNode]:
    """Yield the functions that run before or after a test: set-ups, and the fixtures that it uses directly or not."""
    used: set[object] = {argument.arg for argument in test.args.args}
    for node in (inner for mark in marks for inner in ast.walk(mark)):
        if isinstance(node, ast.Call) and called_name(node) == "usefixtures":
            used |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    unvisited = [*functions]
    # From the test outwards, until no further fixture is used.
    while layer := [node for node in unvisited if node.name in NAMES["called_by_runner"] or _is_used(node, used)]:
        unvisited = [node for node in unvisited if node not in layer]
        used |= {argument.arg for node in layer for argument in node.args.args}
        yield from layer


def _is_used(node: FunctionNode, names: Collection[object]) -> bool:
    """Return whether a function is a fixture with one of these names, or one that all tests use."""
    text = " ".join(map(ast.unparse, node.decorator_list))
    inner = (inner for decorator in node.decorator_list for inner in ast.walk(decorator))
    aliases = {constant.value for constant in inner if isinstance(constant, ast.Constant)}
    return "fixture" in text and ("autouse" in text or not aliases.isdisjoint(names) or node.name in names)


def _imported_helpers(module: ast.Module, test_modules: Mapping[str, ast.Module]) -> dict[str, tuple[str, ast.Module]]:
    """Return the functions of other test files that a module imports: its name -> original name, and that module."""
    helpers: dict[str, tuple[str, ast.Module]] = {}
    for node in _imports(module):
        source = test_modules.get((getattr(node, "module", "") or "").rpartition(".")[2])
        for alias in node.names:
            if source and isinstance(node, ast.ImportFrom):
                names = top_functions(source) if alias.name == "*" else [alias.name]
                helpers |= {alias.asname or name: (name, source) for name in names}
            # An imported module: helpers.check(...).
            if imported := test_modules.get(alias.name.rpartition(".")[2]):
                helpers |= {name: (name, imported) for name in top_functions(imported)}
    return helpers


@lru_cache(maxsize=MODULES)
def _imports(module: ast.Module) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom))


def _find_assertion(node: ast.AST, names: frozenset[str]) -> ast.Assert | ast.Raise | ast.Call | None:
    """Return the first assertion in a node: a statement, or a call of one of these names or of `assert...`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert | ast.Raise):
            return inner
        if isinstance(inner, ast.Call):
            name = called_name(inner)
            if name in names or name in GUARDS or name.lstrip("_").startswith("assert") or name == "fail":
                return inner
    return None


def _describe(assertion: ast.Assert | ast.Raise | ast.Call) -> Sentence:
    if isinstance(assertion, ast.Call):
        return Sentence("envs.repo.calls-function", name=called_name(assertion))
    return Sentence("envs.repo.asserting-statement", statement=type(assertion).__name__.lower())


@lru_cache(maxsize=MODULES)
def asserting_names(module: ast.Module) -> frozenset[str]:
    """Return the names of the functions of a module that may assert, directly or through each other."""
    names: frozenset[str] = frozenset()
    functions = [node for node in ast.walk(module) if isinstance(node, FunctionNode)]
    while True:
        asserting = frozenset(function.name for function in functions if _find_assertion(function, names))
        if asserting <= names:
            return asserting
        names |= asserting


class _Assertions:
    """The questions of a test by the asserting statement; `NotAskable` if a statement cannot become a question."""

    def __init__(self, values: KnownValues, asserting: frozenset[str]) -> None:
        self._values, self._asserting = values, asserting
        self.questions: list[ValueQuestion] = []
        self.by_statement: dict[int, list[ValueQuestion]] = {}
        self._caught: set[str] = set()

    def collect(self, body: Sequence[ast.stmt]) -> None:
        """Add the questions of statements, each of which runs as often as known values determine."""
        for node in body:
            test = self._asserted_condition(node)
            if test is not None:
                conditions = self._conditions(test, True)
                self.by_statement[id(node)] = [self._add_question(*condition) for condition in conditions]
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._collect_block(node)
            elif isinstance(node, ast.For) and not node.orelse and self._is_steady(node):
                self.collect(node.body)
            elif isinstance(node, ast.If) and self._values.is_known(node.test):
                self.collect(node.body)
                self.collect(node.orelse)
            else:
                self._refuse(node)

    def _is_steady(self, node: ast.For) -> bool:
        """Return whether known values determine how often a loop runs."""
        if any(isinstance(inner, ast.Break | ast.Continue) for statement in node.body for inner in ast.walk(statement)):
            return False
        return self._values.is_known(node.iter) or isinstance(loop_table(node.iter), ast.List | ast.Tuple | ast.Dict)

    def _refuse(self, node: ast.stmt) -> None:
        """Raise `NotAskable` if a statement asserts, or decides whether a later one runs."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = called_name(node.value)
            root = dotted_name(node.value.func).partition(".")[0]
            if any(part in name.lower() for part in NAMES["asserting_parts"]) and root != "subprocess":
                raise NotAskable("envs.repo.calls-function", name=name)
        if assertion := _find_assertion(node, self._asserting):
            if isinstance(node, ast.For | ast.While):
                raise NotAskable("envs.repo.asserts-in-loop")
            if isinstance(node, ast.If):
                raise NotAskable("envs.repo.asserts-under-condition")
            raise NotAskable(_describe(assertion))
        returns = any(isinstance(inner, ast.Return) for inner in ast.walk(node))
        if returns and not isinstance(node, ast.Return | FunctionNode):
            raise NotAskable("envs.repo.may-return-early")

    def _collect_block(self, node: ast.With | ast.AsyncWith) -> None:
        guards = [item for item in node.items if guard_kind(item.context_expr)]
        asserts = any(_find_assertion(statement, self._asserting) for statement in node.body)
        if not guards:
            for item in node.items:
                self._refuse(ast.Expr(item.context_expr))
                # A parameter may be pytest.raises(...), and contextlib.suppress ends a block early.
                decides = (
                    dotted_name(item.context_expr) in self._values.cells
                    or dotted_name(getattr(item.context_expr, "func", item)).rpartition(".")[2] == "suppress"
                )
                if decides and asserts:
                    raise NotAskable("envs.repo.asserts-in-block", expression=_shorten(item.context_expr))
            self.collect(node.body)
            return
        call: Any = guards[0].context_expr
        if guard_kind(call) == "warned":
            self.collect(node.body)
        elif asserts:
            raise NotAskable("envs.repo.asserts-in-raising-block")
        if len(guards) > 1 or guards[0] is not node.items[-1]:
            raise NotAskable("envs.repo.several-guards")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        classes = call.args[0] if call.args else keywords.get("expected_exception", _name("Warning"))
        pattern = call.args[1] if len(call.args) > 1 else keywords.get("match", ast.Constant(None))
        if not self._values.is_class(classes) or not self._values.is_known(pattern) or keywords.keys() - {"match"}:
            raise NotAskable("envs.repo.expects-unknown", expression=_shorten(call))
        self.by_statement[id(node)] = [self._add_question(guard_kind(call), None, _tuple(classes, pattern))]
        self._caught.add(dotted_name(guards[0].optional_vars) if guards[0].optional_vars else "")

    def _add_question(self, relation: str, value: ast.expr | None, expected: ast.expr) -> ValueQuestion:
        if value is not None and (assertion := _find_assertion(value, self._asserting)):
            raise NotAskable(_describe(assertion))
        # Files count as known, but code under test may write them too: a file compared with a literal is asked for.
        if value is not None and self._values.is_known(value) and (_is_literal(value) or not _is_literal(expected)):
            raise NotAskable("envs.repo.compares-unknown", expression=_shorten(value))
        self.questions.append(ValueQuestion(len(self.questions), relation, value, expected))
        return self.questions[-1]

    def _asserted_condition(self, node: ast.stmt) -> ast.expr | None:
        """Return the condition that a statement asserts, None for any other statement."""
        if isinstance(node, ast.Assert):
            return node.test
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            return None
        call, name = node.value, called_name(node.value)
        args = call.args
        if name in ASSERTIONS and len(args) >= 2:
            return ast.Compare(args[0], [getattr(ast, ASSERTIONS[name])()], [args[1]])
        if name in ("assertIsNone", "assertIsNotNone") and args:
            return ast.Compare(args[0], [ast.IsNot() if "Not" in name else ast.Is()], [ast.Constant(None)])
        if name in ("assertTrue", "assertFalse", "assert_", "ok_") and args:
            return ast.UnaryOp(ast.Not(), args[0]) if name == "assertFalse" else args[0]
        if name in ("assertIsInstance", "assertNotIsInstance") and len(args) >= 2:
            test = _call("isinstance", *args[:2])
            return ast.UnaryOp(ast.Not(), test) if "Not" in name else test
        if name in RELATIONS and len(args) >= 2:
            return ast.Call(_name(name), args, call.keywords)
        if name == "match" and isinstance(call.func, ast.Attribute) and dotted_name(call.func.value) in self._caught:
            return _call("assertRegex", _call("str", ast.Attribute(call.func.value, "value", ast.Load())), *args)
        return None

    def _conditions(self, node: ast.expr, holds: bool) -> Iterator[Condition]:
        """Yield the conditions that must all hold for an expression to be true, or false."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._conditions(node.operand, not holds)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And if holds else ast.Or):
            for value in node.values:
                yield from self._conditions(value, holds)
        elif isinstance(node, ast.Compare) and (holds or len(node.ops) == 1):
            yield from self._comparisons(node, holds)
        elif isinstance(node, ast.Call) and (condition := self._call_condition(node)):
            yield _negate(condition[0], holds), condition[1], condition[2]
        elif not _is_literal(node):
            yield _negate("true", holds), node, ast.Constant(None)

    def _comparisons(self, node: ast.Compare, holds: bool) -> Iterator[Condition]:
        sides = [node.left, *node.comparators]
        expected = [self._values.is_known(side) for side in sides]
        literal = [_is_literal(side) for side in sides]
        # Literals first: a known value may be a file that code under test writes, or a list that collects results.
        if all(expected):
            expected = literal
        if len(sides) == 2 and not any(expected):
            constructed = [self._values.is_expected(side) for side in sides]
            expected = expected if all(constructed) else constructed
        if all(isinstance(operator, ast.Eq) for operator in node.ops) and len(sides) > 2 and any(expected):
            expected_side = sides[(literal if any(literal) else expected).index(True)]
            for side, is_literal in zip(sides, literal, strict=True):
                if side is not expected_side and not is_literal:
                    yield "==", side, expected_side
            return
        for index, operator in enumerate(node.ops):
            first, second = sides[index : index + 2]
            relation = OPERATORS[type(operator).__name__]
            if literal[index] and literal[index + 1]:
                continue
            if relation.startswith("is"):
                yield self._identity(first, second, (relation == "is") is holds, node)
            elif close := self._tolerance_condition(first, relation, second):
                yield _negate(close[0], holds), close[1], close[2]
            elif expected[index + 1] or (_is_type(first) and self._values.is_class(second)):
                yield _negate(relation, holds), first, second
            elif expected[index]:
                bare = relation.removeprefix("not ")
                yield _negate(NAMES["flipped"][bare], (bare == relation) is holds), second, first
            else:
                raise NotAskable("envs.repo.compares-unknown", expression=_shorten(node))

    def _identity(self, first: ast.expr, second: ast.expr, same: bool, node: ast.expr) -> Condition:
        if _is_type(first) and self._values.is_class(second):
            return ("==" if same else "!="), first, second
        if isinstance(second, ast.Constant):
            # No object decides its own identity, so the result of the comparison is asked.
            return "==", ast.Compare(first, [ast.Is()], [second]), ast.Constant(same)
        if self._values.is_known(second):
            return _negate("is", same), first, second
        raise NotAskable("envs.repo.compares-objects", expression=_shorten(node))

    def _call_condition(self, node: ast.Call) -> Condition | None:
        """Return the condition that a call of a built-in function or method tests; None for any other call."""
        name, args, is_known = called_name(node), node.args, self._values.is_known
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if isinstance(node.func, ast.Name) and name in ("isinstance", "issubclass") and len(args) == 2:
            if self._values.is_class(args[1]):
                return "subclass of", _call("type", args[0]) if name == "isinstance" else args[0], args[1]
        elif name in ("startswith", "endswith") and isinstance(node.func, ast.Attribute) and len(args) == 1:
            if is_known(args[0]):
                return name, node.func.value, args[0]
        elif dotted_name(node.func) in ("re.search", "re.match", "re.fullmatch") and len(args) >= 2:
            if is_known(args[0]):
                return f"re.{name}", args[1], _tuple(args[0], *args[2:3])
        elif name in RELATIONS and isinstance(node.func, ast.Name) and len(args) >= 2:
            value, expected = args[:2] if is_known(args[1]) else (args[1], args[0])
            delta = keywords.get("delta", ast.Constant(None))
            places = args[2] if args[2:] else keywords.get("places", ast.Constant(7))
            if all(map(is_known, (expected, delta, places))):
                tolerances = [places, delta] if RELATIONS[name] == "almost" else []
                return RELATIONS[name], value, _tuple(expected, *tolerances)
            raise NotAskable("envs.repo.compares-unknown", expression=_shorten(node))
        elif dotted_name(node.func) in ("math.isclose", "isclose") and len(args) == 2:
            value, expected = args if is_known(args[1]) else reversed(args)
            tolerances = [keywords.get("rel_tol", ast.Constant(1e-9)), keywords.get("abs_tol", ast.Constant(0.0))]
            if all(map(is_known, (expected, *tolerances))):
                return "isclose", value, _tuple(expected, *tolerances)
        return None

    def _tolerance_condition(self, difference: ast.expr, relation: str, tolerance: ast.expr) -> Condition | None:
        """Return the condition of abs(value - expected) < tolerance, None for any other comparison."""
        if not (isinstance(difference, ast.Call) and dotted_name(difference.func) == "abs" and relation in ("<", "<=")):
            return None
        inside, is_known = difference.args[0], self._values.is_known
        if not (isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Sub) and is_known(tolerance)):
            return None
        value, expected = (inside.left, inside.right) if is_known(inside.right) else (inside.right, inside.left)
        return (f"within {relation}", value, _tuple(expected, tolerance)) if is_known(expected) else None


def _negate(relation: str, holds: bool) -> str:
    """Return a relation if it must hold, its negation otherwise."""
    if holds:
        return relation
    return relation.removeprefix("not ") if relation.startswith("not ") else f"not {relation}"


def guard_kind(node: ast.expr) -> str:
    """Return the name of the context manager that replaces a guard, "" for any other expression."""
    return GUARDS.get(called_name(node), "") if isinstance(node, ast.Call) else ""


def loop_table(node: ast.expr) -> ast.expr:
    """Return the table that a loop reads: the iterated expression, or the mapping of its items."""
    return node.func.value if isinstance(node, ast.Call) and called_name(node) == "items" and not node.args else node  # type: ignore[attr-defined]


class _Rewriter:
    """Replaces the assertions of a test by questions."""

    def __init__(self, values: KnownValues, assertions: _Assertions, sends: Sends) -> None:
        self._values, self._by_statement, self._sends = values, assertions.by_statement, sends

    def version_of(self, test: FunctionNode) -> FunctionNode:
        """Return the version of a test."""
        version = copy.deepcopy(_replace_body(test, self._body(test.body)))
        if self._sends == "withheld":
            for name, cells in columns(version).items():
                if name in self._values.unused:
                    for row, index in cells:
                        row[index] = ast.Constant(None)
            # The ids of rows may reveal what is expected of them.
            for node in version.decorator_list:
                if isinstance(node, ast.Call) and called_name(node) == "parametrize":
                    for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
                        call.keywords = [keyword for keyword in call.keywords if keyword.arg not in ("ids", "id")]
        fixed: FunctionNode = ast.fix_missing_locations(version)
        return fixed

    def _body(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [rewritten for node in body for rewritten in self._statement(node)]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        expecting, unused = self._sends == "expecting", self._values.unused
        if id(node) in self._by_statement:
            inside = self._body(node.body) if isinstance(node, ast.With | ast.AsyncWith) else []
            questions = [self._question(question, node, inside) for question in self._by_statement[id(node)]]
            return [*inside, *questions] if expecting else questions
        if isinstance(node, ast.With | ast.AsyncWith):
            inside = self._body(node.body)
            read = all(self._values.is_known(item.context_expr) for item in node.items)
            names = {dotted_name(item.optional_vars) for item in node.items if item.optional_vars}
            if (expecting and not read) or (self._sends == "withheld" and read and names <= unused):
                return inside
            return [_replace_body(node, inside)]
        if isinstance(node, ast.For | ast.If):
            if expecting and not any(id(inner) in self._by_statement for inner in ast.walk(node)):
                return []
            block = _replace_body(node, self._body(node.body))
            block.orelse = self._body(node.orelse)
            return [block]
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        assigned = self._values.assigned.get(name)
        if expecting:
            is_expected = assigned is not None and self._values.is_expected(assigned.value)
            return [node] if is_expected or isinstance(node, ast.Import | ast.ImportFrom) else []
        if self._sends == "withheld" and name in unused and assigned is not None:
            return []
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return [] if is_text else [node]

    def _question(self, question: ValueQuestion, node: ast.stmt, inside: list[ast.stmt]) -> ast.stmt:
        number, expected = ast.Constant(question.number), [] if self._sends == "withheld" else [question.expected]
        if self._sends == "expecting":
            return ast.Expr(_call(ASK, number, ast.Constant(None), *expected))
        if question.value is not None:
            value = question.value
            if question.relation.endswith("true"):
                # A truth value can be sent whatever the type; `bool` may be a name of the test.
                value = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), value))
            return ast.Expr(_call(ASK, number, value, *expected))
        block = _replace_body(node, inside)
        guard = _call(f"_composer_{question.relation}", number, *expected)
        block.items = [*block.items[:-1], ast.withitem(guard, block.items[-1].optional_vars)]
        with_statement: ast.stmt = block
        return with_statement


def _replace_body(node: ast.AST, body: list[ast.stmt]) -> Any:
    block: Any = copy.copy(node)
    block.body = body or [ast.Pass()]
    return block


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(_name(name), [*args], [])


def _tuple(*elements: ast.expr) -> ast.expr:
    return ast.Tuple([*elements], ast.Load())


def _is_type(node: ast.expr) -> bool:
    """Return whether an expression is the class of a value."""
    return (isinstance(node, ast.Call) and dotted_name(node.func) == "type" and len(node.args) == 1) or (
        isinstance(node, ast.Attribute) and node.attr == "__class__"
    )


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression holds no name."""
    return not any(isinstance(inner, ast.Name | ast.Call | ast.Attribute | ast.Await) for inner in ast.walk(node))


def _shorten(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
