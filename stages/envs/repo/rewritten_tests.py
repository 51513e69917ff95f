"""Find the functions of test files, and write files in which some of them are replaced by other versions.

Versions are made from the syntax tree and written by `ast.unparse`, so that all versions of a function look alike.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stages.envs.repo import trees

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
UNITTEST_NAME = re.compile(r"(\w+) \(([\w.]+)\)$")
"""A test as unittest names it: function (module.Class)."""


@dataclass(frozen=True)
class TestLocation:
    """A test function by its file, the classes around it and its name."""

    __test__ = False  # pytest collects classes named Test*

    path: str
    classes: tuple[str, ...]
    name: str

    def named(self, name: str) -> str:
        """Return the node id, up to parameters, of a version of this function with another name."""
        return "::".join((self.path, *self.classes, name))


class TestFiles:
    """Python test files: `texts` by path, `modules` as far as they can be parsed, `functions` in them.

    Of two functions of one name the later counts, as in Python.
    """

    __test__ = False  # pytest collects classes named Test*

    def __init__(self, files: trees.Changes) -> None:
        # A test file may hold bytes that are not UTF-8; they come back unchanged when the file is written.
        self.texts = {
            path: file.data.decode("utf-8", "surrogateescape")
            for path, file in files.items()
            if file is not None and path.endswith(".py")
        }
        self.modules: dict[str, ast.Module] = {}
        self.functions: dict[TestLocation, FunctionNode] = {}
        for path, text in self.texts.items():
            try:
                self.modules[path] = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            self.functions.update(_functions(path, self.modules[path]))

    def locate(self, test: str) -> TestLocation | None:
        """Return the only function that a test can be, as pytest or unittest names it, or None."""
        if "::" in test:
            path, *classes, name = test.partition("[")[0].split("::")
            function = TestLocation(path, tuple(classes), name)
            return function if function in self.functions else None
        match = UNITTEST_NAME.match(test)
        name, classes = (match[1], match[2].split(".")) if match else (test, [])
        found = [
            function
            for function in self.functions
            if function.name == name and (not classes or set(function.classes) & set(classes))
        ]
        return found[0] if len(found) == 1 else None

    def is_replaceable(self, function: TestLocation) -> bool:
        """Return whether a function can be replaced: it has lines of its own, is no generator, and has no other user.

        In a generator a statement would run only when that is iterated, and a function that another one calls, inherits
        or overrides is more than one test.
        """
        node = self.functions[function]
        mentions, definitions = (
            sum(len(re.findall(pattern.format(re.escape(function.name)), text)) for text in self.texts.values())
            for pattern in (r"\b{}\b", r"\bdef {}\b")
        )
        return (
            mentions == definitions
            and node.body[0].lineno > node.lineno
            and not any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node))
        )

    def with_versions(
        self, versions: Mapping[TestLocation, Sequence[FunctionNode]], imports: str = ""
    ) -> trees.Changes:
        """Return the files in which functions are replaced by their versions, in order, with `imports` at their top."""
        changed: trees.Changes = {}
        for path in dict.fromkeys(function.path for function in versions):
            lines = self.texts[path].split("\n")
            blocks = [(self.functions[function], new) for function, new in versions.items() if function.path == path]
            # From the bottom up, so that the line numbers above stay valid.
            for node, nodes in sorted(blocks, key=lambda block: block[0].lineno, reverse=True):
                indent = re.match(r"[ \t]*", lines[node.lineno - 1])
                margin = indent[0] if indent else ""
                source = "\n\n".join(ast.unparse(one) for one in nodes)
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines[first - 1 : node.end_lineno] = _indented(source, margin)
            lines.insert(self._first_line(path) - 1, imports)
            changed[path] = trees.TreeFile("\n".join(lines).encode("utf-8", "surrogateescape"))
        return changed

    def _first_line(self, path: str) -> int:
        """Return the line of the first statement behind docstring and imports from __future__."""
        for node in self.modules[path].body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        return 1


def _indented(source: str, margin: str) -> list[str]:
    """Return the lines of a source, indented, but for lines inside a string of several lines."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or node.lineno) > node.lineno:
            inside.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return [
        line if number in inside or not line else margin + line for number, line in enumerate(source.split("\n"), 1)
    ]


def function_name(test: str) -> str:
    """Return the function's name of a test, as pytest (path::Class::function[id]) or unittest names it."""
    if match := UNITTEST_NAME.match(test):
        return match[1]
    return test.partition("[")[0].rpartition("::")[2]


def _functions(path: str, module: ast.Module) -> Iterator[tuple[TestLocation, FunctionNode]]:
    """Yield the functions at the top and in classes, depth first in the order of the file."""
    waiting: list[tuple[tuple[str, ...], ast.stmt]] = [((), node) for node in reversed(module.body)]
    while waiting:
        classes, node = waiting.pop()
        if isinstance(node, FunctionNode):
            yield TestLocation(path, classes, node.name), node
        elif isinstance(node, ast.ClassDef):
            waiting.extend(((*classes, node.name), inner) for inner in reversed(node.body))


def own_nodes(node: FunctionNode) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, FunctionNode | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(inner))


def parameters(node: FunctionNode) -> dict[str, tuple[ast.Call, int, int]]:
    """Return the names that `parametrize` decorators give values to: the call, the name's index, how many it names."""
    found = {}
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call) or len(decorator.args) < 2:
            continue
        if getattr(decorator.func, "attr", "") != "parametrize":
            continue
        try:
            names = ast.literal_eval(decorator.args[0])
        except ValueError:
            continue
        names = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
        found.update({name: (decorator, index, len(names)) for index, name in enumerate(names)})
    return found


def parameter_values(rows: ast.expr, index: int, count: int) -> list[tuple[ast.Tuple | ast.List | ast.Call, int]]:
    """Return, for each row of a literal table of parameters, its container and the place of a column in it.

    Empty where a row is not written out; in a table of one column each row is the value, in the table itself.
    """
    if not isinstance(rows, ast.List | ast.Tuple):
        return []
    found: list[tuple[ast.Tuple | ast.List | ast.Call, int]] = []
    for place, row in enumerate(rows.elts):
        if isinstance(row, ast.Call) and getattr(row.func, "attr", "") == "param" and len(row.args) == count:
            found.append((row, index))
        elif count == 1:
            found.append((rows, place))
        elif isinstance(row, ast.Tuple | ast.List) and len(row.elts) == count:
            found.append((row, index))
        else:
            return []
    return found


def set_value(container: ast.Tuple | ast.List | ast.Call, place: int, value: ast.expr) -> None:
    """Replace one value of a row of parameters."""
    (container.args if isinstance(container, ast.Call) else container.elts)[place] = value


def get_value(container: ast.Tuple | ast.List | ast.Call, place: int) -> ast.expr:
    """Return one value of a row of parameters."""
    return (container.args if isinstance(container, ast.Call) else container.elts)[place]
