"""Turn the assertions of a test into questions: `assert f(x) == 3` asks for f(x), and 3 is in no file of the sandbox.

The value that a question asks for leaves the sandbox (guest/composer_outcomes.py: `ask`) and is compared outside
(values.py). Three versions of a test are made: an `open` one, which sends the expected value as well and is run on
trees that hold no code of an agent; an `expecting` one, which sends the expected value alone, for tasks without a
reference solution; and a `withheld` one for the agent's code, in which nothing that only expected values need is left:
variables, columns of `parametrize` and of tables that a loop reads, constants, fixtures and imports of the module.

An expected value can be withheld where no code under test has a part in it. A test is asked where all that it asserts
can be asked, as often as known values say, and nothing that is left tells what is expected: `NotAskable` says why not.
"""

import ast
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from stages.envs.repo.inlining import inline_helpers
from stages.envs.repo.known_values import MODULES, KnownValues, called_name, comparing_functions, dotted_name
from stages.envs.repo.parsed_tests import FunctionNode, columns
from stages.envs.repo.pruning import CALLED_BY_RUNNER

IMPORT = "from composer_questions import ask as _composer_ask, caught as _composer_caught, warned as _composer_warned"
ASK = "_composer_ask"
GUARDS = {
    **dict.fromkeys(("raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"), "caught"),
    **dict.fromkeys(("warns", "assertWarns", "assertWarnsRegex"), "warned"),
}
"""What takes a block and asserts what it raises or warns of -> what takes it in its place."""
OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "in": "has"}
"""The relation of b to a, where a is compared with b."""
COMPARING_ASSERTIONS: dict[str, type[ast.cmpop]] = {
    **dict.fromkeys(("assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual"), ast.Eq),
    **dict.fromkeys(("assertSetEqual", "assertSequenceEqual", "assertMultiLineEqual"), ast.Eq),
    **dict.fromkeys(("eq_", "assert_equal", "assert_equals"), ast.Eq),
    "assertNotEqual": ast.NotEq,
    "assertIn": ast.In,
    "assertNotIn": ast.NotIn,
    "assertIs": ast.Is,
    "assertIsNot": ast.IsNot,
    "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
    "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE,
}
MATCHES = frozenset({"search", "match", "fullmatch"})
TEXT_TESTS = frozenset({"startswith", "endswith"})
ASSERTING = ("assert", "raises", "warns", "fail", "check", "verify", "expect", "validate")
"""Parts of the names of functions that assert, where a test calls one and uses no value of it."""
Sends = Literal["open", "expecting", "withheld"]


class NotAskable(Exception):
    """Not all that a test asserts can be asked; the text is the reason."""


@dataclass(frozen=True)
class ValueQuestion:
    """One question. Of a guard, which takes a block, `value` is None."""

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

    def is_revealed_by(self, text: str) -> bool:
        """Return whether all that is expected stands in what the withheld modules hold (module_text)."""
        return any(self.expected_texts) and all(
            any(one in text for one in told) for literals in self.expected_texts for told in literals
        )


def rewrite_test(
    module: ast.Module,
    owner: ast.ClassDef | None,
    function: FunctionNode,
    fixtures: Mapping[str, FunctionNode],
    beside: Mapping[str, ast.Module] = MappingProxyType({}),
) -> RewrittenTest:
    """Return the versions of a test in a module, and in a class; `NotAskable` where not all of it can be asked.

    `fixtures` are the functions of conftest.py that the test may name, `beside` the modules of the test files by name.
    """
    if any(isinstance(node, ast.Global | ast.Nonlocal | ast.NamedExpr | ast.Yield) for node in ast.walk(function)):
        raise NotAskable("binds names where it reads them")
    helpers = _imported_helpers(module, beside)
    asserting = asserting_names(module) | {name for name, (own, of) in helpers.items() if own in asserting_names(of)}
    deciding = {name for name, (own, of) in helpers.items() if own in comparing_functions(of)}
    around = [*fixtures.values(), *module.body, *(owner.body if owner else ())]
    marks = [*function.decorator_list, *(owner.decorator_list if owner else ())]
    marks += [node for node in module.body if isinstance(node, ast.Assign)]
    for node in _surrounding_functions([node for node in around if isinstance(node, FunctionNode)], marks, function):
        if found := _find_assertion(node, asserting):
            raise NotAskable(f"uses {node.name}(), which {found}")
    if found := "".join(_find_assertion(one, asserting) for one in function.decorator_list):
        raise NotAskable(f"has a decorator that {found}")
    test = inline_helpers(module, owner, function, fixtures, asserting)
    known = KnownValues(
        module, test, comparing_functions(module) | deciding | asserting, {*COMPARING_ASSERTIONS, *CALLS}
    )
    assertions = _Assertions(known, asserting)
    assertions.collect(test.body)
    if not assertions.questions:
        raise NotAskable("asserts nothing that has a value")
    expected = [one.expected for one in assertions.questions]
    known.find_unused(expected)
    absent = frozenset(name for one in assertions.questions for name in _withheld_constants(known, one))
    expects = tuple(frozenset(known.literal_texts(one)) for one in expected)
    open_, expecting, withheld = (_Rewriter(known, assertions, sends).function(test) for sends in SENDS)
    relations = tuple(one.relation for one in assertions.questions)
    return RewrittenTest(open_, expecting, withheld, relations, absent, known.reads_file(expected), expects)


def _withheld_constants(known: KnownValues, one: ValueQuestion) -> frozenset[str]:
    """Return the constants of the module by which alone a question's expected value could be told.

    `NotAskable` where what is left of the test tells the value, or decides it.
    """
    removal_scope = known.removal_scope(one.expected)
    decides = one.value is not None and known.is_comparison(one.value)
    # With an operand that is expected as well, an object that steps aside would be enough.
    if decides and not (
        one.relation == "=="
        and removal_scope
        and known.literal_texts(one.expected).isdisjoint(known.literal_texts(one.value))
    ):
        raise NotAskable(f"decides itself: {_shorten(one.value)}")
    left = sorted(known.remaining_variables(one.expected))
    if not removal_scope and left:
        raise NotAskable(f"holds the expected value in {left[0]}")
    return frozenset() if removal_scope == "test" else known.constants_of(one.expected)


def _surrounding_functions(
    functions: Sequence[FunctionNode], marks: Sequence[ast.AST], test: FunctionNode
) -> Iterator[FunctionNode]:
    """Yield the functions that run before or after a test: set-ups, and fixtures that it, all or other fixtures use."""
    used: set[object] = {one.arg for one in test.args.args}
    for node in (inner for one in marks for inner in ast.walk(one)):
        if isinstance(node, ast.Call) and called_name(node) == "usefixtures":
            used |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    waiting = [*functions]
    # From the test outwards, until no further fixture is used.
    while found := [node for node in waiting if node.name in CALLED_BY_RUNNER or _is_used(node, used)]:
        waiting = [node for node in waiting if node not in found]
        used |= {one.arg for node in found for one in node.args.args}
        yield from found


def _is_used(node: FunctionNode, used: Collection[object]) -> bool:
    """Return whether a function is a fixture that has one of these names, or that all tests use."""
    text = " ".join(map(ast.unparse, node.decorator_list))
    names = {one.value for by in node.decorator_list for one in ast.walk(by) if isinstance(one, ast.Constant)}
    return "fixture" in text and ("autouse" in text or not names.isdisjoint(used) or node.name in used)


def _imported_helpers(module: ast.Module, beside: Mapping[str, ast.Module]) -> dict[str, tuple[str, ast.Module]]:
    """Return the functions of test files that a module imports: name in it -> name there, and the file's module."""
    found: dict[str, tuple[str, ast.Module]] = {}
    for node in _imports(module):
        if isinstance(node, ast.ImportFrom):
            of = beside.get((node.module or "").rpartition(".")[2])
            own = [one.name for one in of.body if isinstance(one, FunctionNode)] if of else []
            for name in node.names:
                for one in own if name.name == "*" else [name.name]:
                    if of:
                        found[name.asname or one] = one, of
        # Called by an attribute of the module: helpers.check(...).
        for name in node.names:
            if of := beside.get(name.name.rpartition(".")[2]):
                found |= {one.name: (one.name, of) for one in of.body if isinstance(one, FunctionNode)}
    return found


@lru_cache(maxsize=MODULES)
def _imports(module: ast.Module) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom))


SENDS: tuple[Sends, ...] = ("open", "expecting", "withheld")


def _find_assertion(node: ast.AST, names: frozenset[str]) -> str:
    """Return what of a node may assert: a statement, or a call of one of these names, or of `assert...`; or ""."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert | ast.Raise):
            return f"has an {type(inner).__name__.lower()} statement"
        if isinstance(inner, ast.Call):
            name = called_name(inner)
            if name in names or name in GUARDS or name.lstrip("_").startswith("assert") or name == "fail":
                return f"calls {name}()"
    return ""


@lru_cache(maxsize=MODULES)
def asserting_names(module: ast.Module) -> frozenset[str]:
    """Return the names of the functions of a module that may assert, also through each other."""
    names: set[str] = set()
    functions = [node for node in ast.walk(module) if isinstance(node, FunctionNode)]
    while True:
        found = frozenset(one.name for one in functions if _find_assertion(one, frozenset(names)))
        if found <= names:
            return found
        names |= found


class _Assertions:
    """The questions of a test, by the statement that asserts; `NotAskable` where a statement cannot be asked."""

    def __init__(self, known: KnownValues, asserting: frozenset[str]) -> None:
        self._known_values, self._asserting = known, asserting
        self.questions: list[ValueQuestion] = []
        self.by_statement: dict[int, list[ValueQuestion]] = {}
        self._caught: set[str] = set()

    def collect(self, body: Sequence[ast.stmt]) -> None:
        """Add the questions of statements that are all reached, each as often as known values say."""
        for node in body:
            test = self._asserted_condition(node)
            if test is not None:
                self.by_statement[id(node)] = [self._add_question(*one) for one in self._conditions(test, True)]
            elif isinstance(node, ast.With | ast.AsyncWith):
                self._collect_block(node)
            elif isinstance(node, ast.For) and not node.orelse and self._is_steady(node):
                self.collect(node.body)
            elif isinstance(node, ast.If) and self._known_values.is_known(node.test):
                self.collect(node.body)
                self.collect(node.orelse)
            else:
                self._refuse(node)

    def _is_steady(self, node: ast.For) -> bool:
        """Return whether a loop runs as often as known values say."""
        if any(isinstance(inner, ast.Break | ast.Continue) for one in node.body for inner in ast.walk(one)):
            return False
        return self._known_values.is_known(node.iter) or isinstance(
            loop_table(node.iter), ast.List | ast.Tuple | ast.Dict
        )

    def _refuse(self, node: ast.stmt) -> None:
        """Raise `NotAskable` where a statement asserts, or decides whether a later one is reached."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = called_name(node.value)
            root = dotted_name(node.value.func).partition(".")[0]
            if any(word in name.lower() for word in ASSERTING) and root != "subprocess":
                raise NotAskable(f"calls {name}()")
        found = _find_assertion(node, self._asserting)
        if found:
            where = {ast.For: "in a loop", ast.While: "in a loop", ast.If: "under a condition"}.get(type(node))
            raise NotAskable(f"asserts {where} of the code under test" if where else found)
        if any(isinstance(inner, ast.Return) for inner in ast.walk(node)) and not isinstance(
            node, ast.Return | FunctionNode
        ):
            raise NotAskable("may return early")

    def _collect_block(self, node: ast.With | ast.AsyncWith) -> None:
        guards = [item for item in node.items if guard_kind(item.context_expr)]
        if not guards:
            for item in node.items:
                self._refuse(ast.Expr(item.context_expr))
                # A parameter may be pytest.raises(...), and contextlib.suppress ends a block early.
                decides = (
                    dotted_name(item.context_expr) in self._known_values.cells
                    or dotted_name(getattr(item.context_expr, "func", item)).rpartition(".")[2] == "suppress"
                )
                if decides and any(_find_assertion(one, self._asserting) for one in node.body):
                    raise NotAskable(f"asserts in a block of {_shorten(item.context_expr)}")
            self.collect(node.body)
            return
        if guard_kind(guards[0].context_expr) == "warned":
            self.collect(node.body)
        for one in node.body:
            if guard_kind(guards[0].context_expr) == "caught" and _find_assertion(one, self._asserting):
                raise NotAskable("asserts in a block that is to raise")
        if len(guards) > 1 or guards[0] is not node.items[-1]:
            raise NotAskable("has several guards of one block")
        call: Any = guards[0].context_expr
        given = {one.arg: one.value for one in call.keywords}
        classes = call.args[0] if call.args else given.get("expected_exception", ast.Name("Warning", ast.Load()))
        pattern = call.args[1] if len(call.args) > 1 else given.get("match", ast.Constant(None))
        if (
            not self._known_values.is_class(classes)
            or not self._known_values.is_known(pattern)
            or given.keys() - {"match"}
        ):
            raise NotAskable(f"expects what is not known: {_shorten(call)}")
        expected = ast.Tuple([classes, pattern], ast.Load())
        self.by_statement[id(node)] = [self._add_question(guard_kind(call), None, expected)]
        self._caught.add(dotted_name(guards[0].optional_vars) if guards[0].optional_vars else "")

    def _add_question(self, relation: str, asked: ast.expr | None, expected: ast.expr) -> ValueQuestion:
        if asked is not None and (found := _find_assertion(asked, self._asserting)):
            raise NotAskable(found)
        # A file is known that the test wrote; code under test may write it too, so that it is asked for by a literal.
        if (
            asked is not None
            and self._known_values.is_known(asked)
            and (_is_literal(asked) or not _is_literal(expected))
        ):
            raise NotAskable(f"compares what is not known: {_shorten(asked)}")
        self.questions.append(ValueQuestion(len(self.questions), relation, asked, expected))
        return self.questions[-1]

    def _asserted_condition(self, node: ast.stmt) -> ast.expr | None:
        """Return what a statement asserts to be true, None of any other statement."""
        if isinstance(node, ast.Assert):
            return node.test
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            return None
        call, name = node.value, called_name(node.value)
        args = call.args
        if name in COMPARING_ASSERTIONS and len(args) >= 2:
            return ast.Compare(args[0], [COMPARING_ASSERTIONS[name]()], [args[1]])
        if name in ("assertIsNone", "assertIsNotNone") and args:
            operator: ast.cmpop = ast.Is() if name == "assertIsNone" else ast.IsNot()
            return ast.Compare(args[0], [operator], [ast.Constant(None)])
        if name in ("assertTrue", "assertFalse", "assert_", "ok_") and args:
            return ast.UnaryOp(ast.Not(), args[0]) if name == "assertFalse" else args[0]
        if name in ("assertIsInstance", "assertNotIsInstance") and len(args) >= 2:
            made: ast.expr = ast.Call(ast.Name("isinstance", ast.Load()), args[:2], [])
            return ast.UnaryOp(ast.Not(), made) if "Not" in name else made
        if name in CALLS and len(args) >= 2:
            return ast.Call(ast.Name(name, ast.Load()), args, call.keywords)
        if name == "match" and isinstance(call.func, ast.Attribute) and dotted_name(call.func.value) in self._caught:
            error = ast.Attribute(call.func.value, "value", ast.Load())
            text = ast.Call(ast.Name("str", ast.Load()), [error], [])
            return ast.Call(ast.Name("assertRegex", ast.Load()), [text, *args], [])
        return None

    def _conditions(self, node: ast.expr, wanted: bool) -> Iterator[tuple[str, ast.expr, ast.expr]]:
        """Yield (relation, asked, expected) that must all hold for an expression to be true, or false."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._conditions(node.operand, not wanted)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And if wanted else ast.Or):
            for value in node.values:
                yield from self._conditions(value, wanted)
        elif isinstance(node, ast.Compare) and (wanted or len(node.ops) == 1):
            yield from self._comparisons(node, wanted)
        elif isinstance(node, ast.Call) and (made := self._call_relation(node)):
            relation, asked, expected = made
            yield (relation if wanted else f"not {relation}"), asked, expected
        elif not _is_literal(node):
            yield "true" if wanted else "not true", node, ast.Constant(None)

    def _comparisons(self, node: ast.Compare, wanted: bool) -> Iterator[tuple[str, ast.expr, ast.expr]]:
        sides = [node.left, *node.comparators]
        known = [self._known_values.is_known(side) for side in sides]
        literal = [_is_literal(side) for side in sides]
        # Literals first: what looks known may be a file that code under test writes, or what results are collected in.
        if all(known):
            known = literal
        if len(sides) == 2 and not any(known):
            made = [self._known_values.is_expected(side) for side in sides]
            known = made if made != [True, True] else known
        if all(isinstance(one, ast.Eq) for one in node.ops) and len(sides) > 2 and any(known):
            expected = sides[(literal if any(literal) else known).index(True)]
            for side, is_literal in zip(sides, literal, strict=True):
                if side is not expected and not is_literal:
                    yield "==", side, expected
            return
        for place, operator in enumerate(node.ops):
            left, right = sides[place : place + 2]
            relation = OPERATORS[type(operator)]
            if literal[place] and literal[place + 1]:
                continue
            if relation.startswith("is"):
                yield from self._identity(left, right, (relation == "is") is wanted, node)
                continue
            if close := self._tolerance_relation(left, relation, right):
                yield (close[0] if wanted else f"not {close[0]}"), close[1], close[2]
                continue
            if not wanted:
                relation = relation.removeprefix("not ") if relation.startswith("not ") else f"not {relation}"
            classes = _is_type(left) and self._known_values.is_class(right)
            if known[place + 1] or classes:
                yield relation, left, right
            elif known[place]:
                negated, bare = relation.startswith("not "), relation.removeprefix("not ")
                yield (f"not {FLIPPED[bare]}" if negated else FLIPPED[bare]), right, left
            else:
                raise NotAskable(f"compares what is not known: {_shorten(node)}")

    def _identity(
        self, left: ast.expr, right: ast.expr, same: bool, node: ast.expr
    ) -> Iterator[tuple[str, ast.expr, ast.expr]]:
        if _is_type(left) and self._known_values.is_class(right):
            yield ("==" if same else "!="), left, right
        elif isinstance(right, ast.Constant):
            # Identity is no object's own decision, so whether is what is asked.
            yield "==", ast.Compare(left, [ast.Is()], [right]), ast.Constant(same)
        elif self._known_values.is_known(right):
            yield ("is" if same else "not is"), left, right
        else:
            raise NotAskable(f"compares objects: {_shorten(node)}")

    def _call_relation(self, node: ast.Call) -> tuple[str, ast.expr, ast.expr] | None:
        """Return the relation that a call of a built-in function or method tests; None of any other call."""
        name, args, known = called_name(node), node.args, self._known_values
        if isinstance(node.func, ast.Name) and name in ("isinstance", "issubclass") and len(args) == 2:
            if known.is_class(args[1]):
                asked = ast.Call(ast.Name("type", ast.Load()), [args[0]], []) if name == "isinstance" else args[0]
                return "subclass of", asked, args[1]
        elif name in TEXT_TESTS and isinstance(node.func, ast.Attribute) and len(args) == 1 and known.is_known(args[0]):
            return name, node.func.value, args[0]
        elif name in MATCHES and dotted_name(node.func) == f"re.{name}" and len(args) >= 2 and known.is_known(args[0]):
            return f"re.{name}", args[1], ast.Tuple([args[0], *args[2:3]], ast.Load())
        elif name in CALLS and isinstance(node.func, ast.Name):
            asked, expected = args[:2]
            if not known.is_known(expected):
                asked, expected = expected, asked
            delta = next((one.value for one in node.keywords if one.arg == "delta"), ast.Constant(None))
            places = [*args[2:3], *(one.value for one in node.keywords if one.arg == "places"), ast.Constant(7)][0]
            if known.is_known(expected) and all(map(known.is_known, (delta, places))):
                further = [places, delta] if CALLS[name] == "almost" else []
                return CALLS[name], asked, ast.Tuple([expected, *further], ast.Load())
            raise NotAskable(f"compares what is not known: {_shorten(node)}")
        elif dotted_name(node.func) in ("math.isclose", "isclose") and len(args) == 2:
            asked, expected = args if known.is_known(args[1]) else reversed(args)
            given = {one.arg: one.value for one in node.keywords}
            tolerances = [given.get("rel_tol", ast.Constant(1e-9)), given.get("abs_tol", ast.Constant(0.0))]
            if known.is_known(expected) and all(map(known.is_known, tolerances)):
                return "isclose", asked, ast.Tuple([expected, *tolerances], ast.Load())
        return None

    def _tolerance_relation(
        self, left: ast.expr, relation: str, right: ast.expr
    ) -> tuple[str, ast.expr, ast.expr] | None:
        """Return what abs(asked - expected) < tolerance tests, with the tolerance applied outside."""
        if not (isinstance(left, ast.Call) and dotted_name(left.func) == "abs" and relation in ("<", "<=")):
            return None
        inside = left.args[0]
        if not (
            isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Sub) and self._known_values.is_known(right)
        ):
            return None
        asked, expected = inside.left, inside.right
        if not self._known_values.is_known(expected):
            asked, expected = expected, asked
        if not self._known_values.is_known(expected):
            return None
        return f"within {relation}", asked, ast.Tuple([expected, right], ast.Load())


CALLS = {
    "assertAlmostEqual": "almost",
    "assertAlmostEquals": "almost",
    "assertCountEqual": "same elements",
    "assertRegex": "re.search",
    "assertRegexpMatches": "re.search",
}
"""Assertions of unittest -> the relation that they test, with the value first."""


def guard_kind(node: ast.expr) -> str:
    """Return what takes the place of a guard of a block, "" of any other expression."""
    return GUARDS.get(called_name(node), "") if isinstance(node, ast.Call) else ""


def loop_table(node: ast.expr) -> ast.expr:
    """Return the table that a loop reads: what is iterated, or the mapping of its items."""
    return node.func.value if isinstance(node, ast.Call) and called_name(node) == "items" and not node.args else node  # type: ignore[attr-defined]


class _Rewriter(ast.NodeTransformer):
    """Puts questions in the place of assertions."""

    def __init__(self, known: KnownValues, found: _Assertions, sends: Sends) -> None:
        self._known_values, self._by_statement, self._sends = known, found.by_statement, sends

    def function(self, function: FunctionNode) -> FunctionNode:
        """Return a version of the test."""
        made = copy.copy(function)
        made.body = self._body(function.body) or [ast.Pass()]
        made = copy.deepcopy(made)
        if self._sends == "withheld":
            for name, cells in columns(made).items():
                if name in self._known_values.unused:
                    for values, place in cells:
                        values[place] = ast.Constant(None)
            # Names of rows tell what is expected of them.
            for node in made.decorator_list:
                if isinstance(node, ast.Call) and called_name(node) == "parametrize":
                    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
                        call.keywords = [one for one in call.keywords if one.arg not in ("ids", "id")]
        return ast.fix_missing_locations(made)

    def _body(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for node in body for made in self._statement(node)]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        expecting, unused = self._sends == "expecting", self._known_values.unused
        if id(node) in self._by_statement:
            inside = self._body(node.body) if isinstance(node, ast.With | ast.AsyncWith) else []
            asked = [self._question(one, node, inside) for one in self._by_statement[id(node)]]
            return [*inside, *asked] if expecting else asked
        asks = any(id(inner) in self._by_statement for inner in ast.walk(node))
        if isinstance(node, ast.With | ast.AsyncWith):
            inside = self._body(node.body)
            read = all(self._known_values.is_known(item.context_expr) for item in node.items)
            names = {dotted_name(item.optional_vars) for item in node.items if item.optional_vars}
            if (expecting and not read) or (self._sends == "withheld" and read and names <= unused):
                return inside
            return [_replace_body(node, inside)]
        if isinstance(node, ast.For | ast.If):
            if expecting and not asks:
                return []
            made = _replace_body(node, self._body(node.body))
            made.orelse = self._body(node.orelse)  # type: ignore[attr-defined]
            return [made]
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if expecting:
            known = name in self._known_values.assigned and self._known_values.is_expected(
                self._known_values.assigned[name].value
            )
            return [node] if known or isinstance(node, ast.Import | ast.ImportFrom) else []
        if self._sends == "withheld" and name in unused and name in self._known_values.assigned:
            return []
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return [] if is_text else [node]

    def _question(self, one: ValueQuestion, node: ast.stmt, inside: list[ast.stmt]) -> ast.stmt:
        number, expected = ast.Constant(one.number), [] if self._sends == "withheld" else [one.expected]
        if self._sends == "expecting":
            return ast.Expr(ast.Call(ast.Name(ASK, ast.Load()), [number, ast.Constant(None), *expected], []))
        if one.value is not None:
            asked = one.value
            if one.relation.endswith("true"):
                # What is true needs no type that can be sent; `bool` may be a name of the test.
                asked = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), asked))
            return ast.Expr(ast.Call(ast.Name(ASK, ast.Load()), [number, asked, *expected], []))
        guard = ast.Call(ast.Name(f"_composer_{one.relation}", ast.Load()), [number, *expected], [])
        made: Any = _replace_body(node, inside)
        made.items = [*made.items[:-1], ast.withitem(guard, made.items[-1].optional_vars)]
        block: ast.stmt = made
        return block


def _replace_body(node: ast.stmt, body: list[ast.stmt]) -> ast.stmt:
    made: Any = copy.copy(node)
    made.body = body or [ast.Pass()]
    result: ast.stmt = made
    return result


def _is_type(node: ast.expr) -> bool:
    """Return whether an expression asks for the class of a value."""
    return (isinstance(node, ast.Call) and dotted_name(node.func) == "type" and len(node.args) == 1) or (
        isinstance(node, ast.Attribute) and node.attr == "__class__"
    )


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression holds no name."""
    return not any(isinstance(one, ast.Name | ast.Call | ast.Attribute | ast.Await) for one in ast.walk(node))


def _shorten(node: ast.AST | None) -> str:
    text = ast.unparse(node) if node is not None else ""
    return text if len(text) <= 60 else text[:57] + "..."
