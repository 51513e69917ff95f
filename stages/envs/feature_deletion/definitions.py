"""Functions and classes of a source file, and the edits that remove their code.

Edits are made by line numbers, so that comments and layout of the rest stay unchanged.
"""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

STUB = "raise NotImplementedError"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Node = FunctionNode | ast.ClassDef


@dataclass(frozen=True)
class Keep:
    """The parts of a definition that a removal keeps."""

    docstring: bool
    signature: bool


@dataclass(frozen=True)
class Edit:
    """Lines first..last (from 1, both included) are replaced by `lines`."""

    first: int
    last: int
    lines: tuple[str, ...]


class Definition:
    """A function at the top of a module or of a class, or a class at the top of a module.

    symbol: `path:qualname`; key: also the line. top: the name at the top of the module that the definition belongs to.
    functions: the function itself, or the methods of a class. bodies: the unchanged lines of every body, without
    docstrings; body_lines: their line numbers. code: the lines of code in the bodies that have something to remove,
    stripped, without blank lines and comments.
    """

    def __init__(self, path: str, qualname: str, node: Node, source: tuple[str, ...]) -> None:
        self.path, self.qualname, self.node, self.source = path, qualname, node, source
        self.symbol = f"{path}:{qualname}"
        # A name can be defined twice (a property and its setter, @overload), so the symbol alone is ambiguous.
        self.key = f"{self.symbol}:{node.lineno}"
        self.top = qualname.partition(".")[0]
        self.kind: Literal["function", "class"] = "class" if isinstance(node, ast.ClassDef) else "function"
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        self.functions = tuple(function for function in methods if isinstance(function, FunctionNode))
        self.bodies: list[tuple[str, ...]] = []
        self.body_lines: set[int] = set()
        self.code: list[str] = []
        self._removable: list[FunctionNode] = []
        for function in self.functions:
            statements = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
            if not statements:
                continue
            first, last = statements[0].lineno, function.end_lineno or 0
            body = source[first - 1 : last]
            self.bodies.append(body)
            self.body_lines.update(range(first, last + 1))
            # Only `pass`, `...` or `raise NotImplementedError` (abstract methods, protocols): nothing to remove.
            is_empty = all(
                isinstance(statement, ast.Pass)
                or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                or (isinstance(statement, ast.Raise) and "NotImplemented" in ast.dump(statement))
                for statement in statements
            )
            if not is_empty:
                self._removable.append(function)
                self.code += (bare for line in body if (bare := line.strip()) and not bare.startswith("#"))

    def edits(self, keep: Keep, body: str = STUB) -> list[Edit]:
        """Return the edits that remove the code; `body` replaces each body, `{first}` in it the first argument.

        A class without signatures loses everything but its header, maybe its docstring, and a constructor that raises.
        """
        nodes: Sequence[Node] = self._removable
        if isinstance(self.node, ast.ClassDef) and not keep.signature:
            nodes = [self.node]
        edits: list[Edit] = []
        for node in nodes:
            line = self.source[node.lineno - 1]
            indent = line[: len(line) - len(line.lstrip())]
            inner = indent + "    "
            docstring = _docstring_lines(node, self.source, inner) if keep.docstring else []
            if isinstance(node, ast.ClassDef):
                header = _header(node, self.source)
                statements = [f"{inner}def __init__(self, *args, **kwargs):", f"{inner}    {STUB}"]
            else:
                word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                header = [f"{indent}{word} {node.name}(*args, **kwargs):"]
                if keep.signature:
                    header = _header(node, self.source)
                # The first argument that is not the object itself.
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                first = next((name for name in names if name not in ("self", "cls")), "None")
                # A constructor that returns a value raises TypeError, so no trivial body but `pass` could ever work.
                statement = body if body == STUB or node.name != "__init__" else "pass"
                statements = [inner + statement.replace("{first}", first)]
            # From the line of `def` on: decorators (@property, @classmethod) stay, since callers depend on them.
            edits.append(Edit(node.lineno, node.end_lineno or 0, (*header, *docstring, *statements)))
        return edits


def definitions(path: str, text: str) -> list[Definition]:
    """Return the definitions of a file, none when it cannot be parsed."""
    if "\r" in text.replace("\r\n", ""):  # a line end for ast, and none for the edits
        return []
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    # Not splitlines(), which also splits at form feeds: ast counts none of those as a line end.
    source = tuple(text.split("\n"))
    result: list[Definition] = []
    for node in module.body:
        if isinstance(node, Node):
            result.append(Definition(path, node.name, node, source))
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, FunctionNode))
            result += (Definition(path, f"{node.name}.{inner.name}", inner, source) for inner in methods)
    return result


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return a file's text after edits, which must not overlap."""
    lines = text.split("\n")
    # From the last line up, so that the line numbers of the edits still to come stay valid.
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines)


def _header(node: Node, source: tuple[str, ...]) -> list[str]:
    """Return the lines from `def` or `class` up to the colon before the body."""
    first = node.body[0]
    lines = list(source[node.lineno - 1 : first.lineno])
    # ast's columns count bytes of UTF-8, not characters.
    last = lines.pop().encode()[: first.col_offset].decode()
    # ast has no position for the colon: go up over the indentation, blank lines and comments before the body.
    while not (last.strip() or not lines) or (last.strip().startswith("#") and lines):
        last = lines.pop()
    return [*lines, last.rstrip()]


def _docstring_lines(node: Node, source: tuple[str, ...], inner: str) -> list[str]:
    """Return the docstring's lines, the first with the indentation `inner`; none where there is no docstring."""
    if ast.get_docstring(node, clean=False) is None:
        return []
    first = node.body[0]
    lines = [line.encode() for line in source[first.lineno - 1 : first.end_lineno]]
    lines[-1] = lines[-1][: first.end_col_offset]
    lines[0] = inner.encode() + lines[0][first.col_offset :]
    return [line.decode() for line in lines]
