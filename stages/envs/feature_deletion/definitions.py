"""Functions and classes of a source file, and what is left of one when its code is removed.

Everything is found by line numbers, so that comments and layout of the rest stay as they are.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

STUB = "raise NotImplementedError"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Node = FunctionNode | ast.ClassDef


@dataclass(frozen=True)
class Keep:
    """What stays of something that is removed."""

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
        """What it is."""
        return "class" if isinstance(self.node, ast.ClassDef) else "function"

    @property
    def top(self) -> str:
        """The name at the top of the module that it belongs to."""
        return self.qualname.partition(".")[0]

    @property
    def functions(self) -> tuple[FunctionNode, ...]:
        """Itself, or the methods of a class."""
        if isinstance(self.node, ast.ClassDef):
            return tuple(node for node in self.node.body if isinstance(node, FunctionNode))
        return (self.node,)

    @property
    def code(self) -> list[str]:
        """The lines of code in all bodies: stripped, without blank lines and comments."""
        return [line for function in self.functions for line in code_lines(self.source, function)]

    @property
    def bodies(self) -> list[tuple[str, ...]]:
        """The lines of every body as they stand, without docstrings."""
        first = [(_after_docstring(function), function.end_lineno) for function in self.functions]
        return [self.source[statement.lineno - 1 : last] for statement, last in first if statement is not None]

    def covers(self) -> set[int]:
        """The line numbers of all bodies."""
        return {
            line
            for function in self.functions
            if (first := _after_docstring(function)) is not None
            for line in range(first.lineno, (function.end_lineno or 0) + 1)
        }

    def edits(self, keep: Keep, body: str = STUB) -> list[Edit]:
        """How its code is removed; `body` stands in its place, `{first}` in it for the first argument."""
        if isinstance(self.node, ast.ClassDef) and not keep.signature:
            return [_class_edit(self.node, self.source, keep)]
        return [edit for function in self.functions if (edit := _function_edit(function, self.source, keep, body))]


def definitions(path: str, text: str) -> list[Definition]:
    """What a file defines; nothing when it cannot be parsed."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    source = tuple(text.split("\n"))
    return [Definition(path, name, node, source) for name, node in _named(module.body, "")]


def _named(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Node]]:
    for node in body:
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and not prefix:
            yield node.name, node
            yield from _named(node.body, f"{node.name}.")


def without(text: str, edits: Iterable[Edit]) -> str:
    """A file's text after edits, which must not overlap."""
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines)


def code_lines(source: tuple[str, ...], function: FunctionNode) -> list[str]:
    """A function's code after its docstring, line by line, stripped, without blank lines and comments."""
    first = _after_docstring(function)
    if first is None or _is_empty(function):
        return []
    stripped = (line.strip() for line in source[first.lineno - 1 : function.end_lineno])
    return [line for line in stripped if line and not line.startswith("#")]


def _has_docstring(node: Node) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _after_docstring(node: Node) -> ast.stmt | None:
    rest = node.body[1:] if _has_docstring(node) else node.body
    return rest[0] if rest else None


def _is_empty(function: FunctionNode) -> bool:
    """Whether there is nothing to remove: only a docstring, `pass`, `...` or `raise NotImplementedError`."""
    rest = function.body[1:] if _has_docstring(function) else function.body
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Raise) and "NotImplemented" in ast.dump(node))
        for node in rest
    )


def _indent(source: tuple[str, ...], node: Node) -> str:
    line = source[node.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _function_edit(function: FunctionNode, source: tuple[str, ...], keep: Keep, body: str) -> Edit | None:
    if _is_empty(function):
        return None
    inner = _indent(source, function) + "    "
    docstring = _docstring_lines(function, source, inner) if keep.docstring else []
    header = _header(function, source) if keep.signature else [_any_arguments(function, source)]
    instead = body if body == STUB or function.name != "__init__" else "pass"
    instead = instead.replace("{first}", _first_argument(function))
    return Edit(function.lineno, function.end_lineno or 0, (*header, *docstring, inner + instead))


def _first_argument(function: FunctionNode) -> str:
    """The name of the first argument that is not the object itself; None where there is none."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return next((name for name in names if name not in ("self", "cls")), "None")


def _class_edit(node: ast.ClassDef, source: tuple[str, ...], keep: Keep) -> Edit:
    inner = _indent(source, node) + "    "
    docstring = _docstring_lines(node, source, inner) if keep.docstring else []
    init = (f"{inner}def __init__(self, *args, **kwargs):", f"{inner}    {STUB}")
    return Edit(node.lineno, node.end_lineno or 0, (*_header(node, source), *docstring, *init))


def _header(node: Node, source: tuple[str, ...]) -> list[str]:
    """The lines from `def` or `class` up to the colon before the body."""
    first = node.body[0]
    lines = list(source[node.lineno - 1 : first.lineno])
    last = lines.pop().encode()[: first.col_offset].decode()
    while not (last.strip() or not lines) or (last.strip().startswith("#") and lines):
        last = lines.pop()
    return [*lines, last.rstrip()]


def _docstring_lines(node: Node, source: tuple[str, ...], inner: str) -> list[str]:
    if not _has_docstring(node):
        return []
    first = node.body[0]
    lines = [line.encode() for line in source[first.lineno - 1 : first.end_lineno]]
    lines[-1] = lines[-1][: first.end_col_offset]
    lines[0] = inner.encode() + lines[0][first.col_offset :]
    return [line.decode() for line in lines]


def _any_arguments(function: FunctionNode, source: tuple[str, ...]) -> str:
    """A header that tells nothing of the signature."""
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    return f"{_indent(source, function)}{word} {function.name}(*args, **kwargs):"
