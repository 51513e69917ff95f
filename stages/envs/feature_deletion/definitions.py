"""Functions and classes of a source file, and the edits that remove their code.

Edits are made by line numbers, so that comments and layout of the rest stay unchanged.
"""

import ast
from collections.abc import Iterable
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


@dataclass(frozen=True)
class Definition:
    """A function at the top of a module or of a class, or a class at the top of a module."""

    path: str
    qualname: str
    node: Node
    source: tuple[str, ...]

    @property
    def kind(self) -> Literal["function", "class"]:
        """Whether it is a function or a class."""
        return "class" if isinstance(self.node, ast.ClassDef) else "function"

    @property
    def top(self) -> str:
        """The name at the top of the module that it belongs to."""
        return self.qualname.partition(".")[0]

    @property
    def functions(self) -> tuple[FunctionNode, ...]:
        """The function itself, or the methods of a class."""
        if isinstance(self.node, ast.ClassDef):
            return tuple(node for node in self.node.body if isinstance(node, FunctionNode))
        return (self.node,)

    @property
    def code(self) -> list[str]:
        """The lines of code in all bodies: stripped, without docstrings, blank lines and comments.

        A body with nothing to remove has none.
        """
        stripped: list[str] = []
        for function in self.functions:
            if not _is_empty(function):
                first = _statements(function)[0].lineno
                stripped += (line.strip() for line in self.source[first - 1 : function.end_lineno])
        return [line for line in stripped if line and not line.startswith("#")]

    @property
    def bodies(self) -> list[tuple[str, ...]]:
        """The unchanged lines of every body, without docstrings."""
        return [
            self.source[rest[0].lineno - 1 : function.end_lineno]
            for function in self.functions
            if (rest := _statements(function))
        ]

    def covers(self) -> set[int]:
        """Return the line numbers of all bodies."""
        return {
            line
            for function in self.functions
            if (rest := _statements(function))
            for line in range(rest[0].lineno, (function.end_lineno or 0) + 1)
        }

    def edits(self, keep: Keep, body: str = STUB) -> list[Edit]:
        """Return the edits that remove its code; `body` replaces it, `{first}` in it the first argument.

        A class without signatures loses everything but its header, maybe its docstring, and a constructor that raises.
        """
        if isinstance(self.node, ast.ClassDef) and not keep.signature:
            inner = _indent(self.source, self.node) + "    "
            docstring = _docstring_lines(self.node, self.source, inner) if keep.docstring else []
            init = (f"{inner}def __init__(self, *args, **kwargs):", f"{inner}    {STUB}")
            lines = (*_header(self.node, self.source), *docstring, *init)
            return [Edit(self.node.lineno, self.node.end_lineno or 0, lines)]
        return [
            _function_edit(function, self.source, keep, body) for function in self.functions if not _is_empty(function)
        ]


def definitions(path: str, text: str) -> list[Definition]:
    """Return the definitions of a file, none when it cannot be parsed."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    source = tuple(text.split("\n"))
    found: list[Definition] = []
    for node in module.body:
        if isinstance(node, Node):
            found.append(Definition(path, node.name, node, source))
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, FunctionNode))
            found += (Definition(path, f"{node.name}.{inner.name}", inner, source) for inner in methods)
    return found


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return a file's text after edits, which must not overlap."""
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines)


def _statements(node: Node) -> list[ast.stmt]:
    """Return the statements of a body after its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _is_empty(function: FunctionNode) -> bool:
    """Return whether there is nothing to remove: only a docstring, `pass`, `...` or `raise NotImplementedError`."""
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Raise) and "NotImplemented" in ast.dump(node))
        for node in _statements(function)
    )


def _function_edit(function: FunctionNode, source: tuple[str, ...], keep: Keep, body: str) -> Edit:
    indent = _indent(source, function)
    inner = indent + "    "
    docstring = _docstring_lines(function, source, inner) if keep.docstring else []
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    header = [f"{indent}{word} {function.name}(*args, **kwargs):"]
    if keep.signature:
        header = _header(function, source)
    # The first argument that is not the object itself.
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    first = next((name for name in names if name not in ("self", "cls")), "None")
    statement = body if body == STUB or function.name != "__init__" else "pass"
    lines = (*header, *docstring, inner + statement.replace("{first}", first))
    return Edit(function.lineno, function.end_lineno or 0, lines)


def _indent(source: tuple[str, ...], node: Node) -> str:
    line = source[node.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _header(node: Node, source: tuple[str, ...]) -> list[str]:
    """Return the lines from `def` or `class` up to the colon before the body."""
    first = node.body[0]
    lines = list(source[node.lineno - 1 : first.lineno])
    last = lines.pop().encode()[: first.col_offset].decode()  # columns count bytes
    while not (last.strip() or not lines) or (last.strip().startswith("#") and lines):
        last = lines.pop()
    return [*lines, last.rstrip()]


def _docstring_lines(node: Node, source: tuple[str, ...], inner: str) -> list[str]:
    if ast.get_docstring(node, clean=False) is None:
        return []
    first = node.body[0]
    lines = [line.encode() for line in source[first.lineno - 1 : first.end_lineno]]
    lines[-1] = lines[-1][: first.end_col_offset]
    lines[0] = inner.encode() + lines[0][first.col_offset :]
    return [line.decode() for line in lines]
