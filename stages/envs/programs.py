"""The Python program of an answer: the last complete one that defines what is asked, put together from its blocks.

Blocks are those of CommonMark, in lists and quotations too; without any the text itself is searched, with prose around.
Imports and helpers that the program needs and another block defines stand in front of it. Nothing is executed.
"""

import ast
import builtins
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

from markdown_it import MarkdownIt

from composer_stages.messages import answer_text

LANGUAGES = frozenset({"", "python", "python3", "py", "py3", "python2", "pycon", "ipython"})
TAGS = re.compile(r"(?im)^[ \t]*</?(?:answer|final_answer|solution|code|response)>[ \t]*$|</?(?:answer|final_answer)>")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.M)
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of the compiler on text that is no program: the last three on NULs and on bottomless nesting."""
BEGINS = re.compile(r"(?:import|from|def|async def|class|@|if|for|try|with)\b|@|[A-Za-z_][\w.\[\], ]*(?::[^=]+)?=[^=]")
"""How a program begins among prose."""


@dataclass(frozen=True)
class CodeBlock:
    """A block of code. language: the first word behind the fence; None of an indented block."""

    code: str
    language: str | None = ""

    @cached_property
    def body(self) -> list[ast.stmt] | None:
        """Return its statements, None where it is no Python."""
        return statements(self.code)


def statements(code: str) -> list[ast.stmt] | None:
    """Return the statements of a program, None of a text that is no program."""
    with warnings.catch_warnings(action="ignore"), suppress(*UNREADABLE):
        return ast.parse(code).body
    return None


def read_blocks(text: str) -> list[CodeBlock]:
    """Return the Python blocks of an answer, without its thoughts; the last may lack its end."""
    text = _answer(text)
    lines = text.split("\n")
    blocks = []
    for token in _markdown().parse(text):
        if token.type not in ("fence", "code_block"):
            continue
        word = re.sub(r"[{}.]", " ", token.info).split()
        language = (word[0].lower() if word else "") if token.type == "fence" else None
        block = CodeBlock(token.content, language)
        if language in LANGUAGES and block.body is None and token.map:
            # A fence in a text of the program, which is not indented by four blanks, ends the block in CommonMark.
            block = next(_repaired(block.code, lines[token.map[0] + 1 :]), block)
        blocks.append(block)
    return [block for block in blocks if block.language is None or block.language in LANGUAGES] or blocks


def _answer(text: str) -> str:
    """Return a text without thoughts and the tags around an answer, with line feeds alone."""
    return TAGS.sub("\n", answer_text(text).replace("\r\n", "\n"))


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark")


def _repaired(code: str, lines: Sequence[str]) -> Iterator[CodeBlock]:
    """Yield what may be meant by a block: without prompts, up to a fence behind its last line, up to a later fence."""
    prompted = [line[4:] for line in code.split("\n") if line.startswith((">>> ", "... "))]
    for shorter in (["\n".join([*prompted, ""])] if prompted else []), re.split(r"`{3,}|~{3,}", code)[:1]:
        yield from (block for block in map(CodeBlock, shorter) if block.body)
    for number, line in enumerate(lines):
        if FENCE.match(line) and (block := CodeBlock("\n".join([*lines[:number], ""]))).body:
            yield block


def find_program(text: str, name: str) -> str | None:
    """Return the last program of an answer that defines a name, with the blocks that it needs; None for none."""
    blocks = read_blocks(text)
    fenced = [block for block in blocks if block.language is not None]
    indented = [block for block in blocks if block.language is None]
    # The beginning of a broken program is none.
    prose = [] if any(block.body is None for block in fenced) else list(_among_prose(text))
    for candidates in (fenced, indented, prose):
        defining = [number for number, block in enumerate(candidates) if name in bound_names(block.body or ())]
        if defining:
            return _with_needed(candidates, defining[-1])
    return None


def find_error(text: str, name: str) -> str:
    """Return why the code of an answer that mentions a definition is no Python; "" where none does."""
    for block in reversed(read_blocks(text) or [CodeBlock(_answer(text))]):
        if block.body is None and re.search(
            rf"\b(?:def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", block.code, re.M
        ):
            try:
                ast.parse(block.code)
            except UNREADABLE as error:
                line = getattr(error, "lineno", None)
                return f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
    return ""


def bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements define at the top, under `if` and `try` as well."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.Expr | ast.With):
            stored = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            names.update(part.id for part in stored if not isinstance(node, ast.AnnAssign) or node.value)
        if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(node, field, None)
                if isinstance(inner, list) and not isinstance(
                    node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
                ):
                    names |= bound_names(inner)
            for handler in getattr(node, "handlers", ()):
                names |= bound_names(handler.body)
    return names


def _with_needed(blocks: Sequence[CodeBlock], chosen: int) -> str:
    """Return a block behind those that define what it, and they, use and do not define."""
    needed, open_numbers = {chosen}, [chosen]
    while open_numbers:
        body = blocks[open_numbers.pop()].body or []
        for name in sorted(_used_names(body) - bound_names(body)):
            others = [n for n, block in enumerate(blocks) if n not in needed and name in bound_names(block.body or ())]
            if others and not any(name in bound_names(blocks[number].body or ()) for number in needed):
                nearest = max((n for n in others if n < chosen), default=min(others))
                needed.add(nearest)
                open_numbers.append(nearest)
    return "\n".join(blocks[number].code for number in [*sorted(needed - {chosen}), chosen])


def _used_names(body: Sequence[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return used - stored - vars(builtins).keys()


def _among_prose(text: str) -> Iterator[CodeBlock]:
    """Yield the programs among the lines of a text, the longest from each line that begins one."""
    lines = _answer(text).split("\n")
    number = 0
    while number < len(lines):
        if BEGINS.match(lines[number]):
            end = _end_of_program(lines, number)
            if end > number:
                yield CodeBlock("\n".join([*lines[number:end], ""]))
                number = end
                continue
        number += 1


def _end_of_program(lines: Sequence[str], begin: int) -> int:
    """Return the line behind the longest program that begins at a line, or that line where there is none."""
    end = len(lines)
    while end > begin:
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse("\n".join(lines[begin:end]))
        except SyntaxError as error:
            end = min(end - 1, begin + (error.lineno or 1) - 1)
        except UNREADABLE:
            return begin
        else:
            return end
    return begin
