"""What an answer holds: its code, and the test function among it."""

import ast
import re
import warnings
from dataclasses import dataclass
from functools import cached_property

BLOCK = re.compile(r"```(?:python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
MAIN_GUARD = "if __name__"
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What the compiler raises on text that is no program: the last three on NULs and on bottomless nesting."""


@dataclass(frozen=True)
class TestFunction:
    """A function that an answer defines to be tested by, cut out of it: a method of Solution, or beside it."""

    __test__ = False  # pytest takes classes named Test* for tests

    name: str
    source: str
    is_method: bool

    @property
    def call(self) -> str:
        """The expression that runs it."""
        return f"{'Solution().' if self.is_method else ''}{self.name}()"


@dataclass(frozen=True)
class Answer:
    """One assistant message. Nothing of it is executed here."""

    text: str

    @cached_property
    def code(self) -> str | None:
        """What its ```python blocks, or unlabelled ones, hold together; the last may lack its end. None without any."""
        blocks = [block.strip() for block in BLOCK.findall(self.text)]
        return "\n\n".join(filter(None, blocks)) or None

    @cached_property
    def compiles(self) -> bool:
        """Whether the code is a Python program."""
        if self.code is None:
            return False
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(self.code, "answer.py", "exec")
        except UNREADABLE:
            return False
        return True

    def test_function(self, name: str) -> TestFunction | None:
        """The first function `name`, outermost first, or None; one with a main guard would test nothing when called."""
        if not self.compiles or self.code is None:
            return None
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(self.code)
        found = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name), None)
        try:
            source = "" if found is None else ast.unparse(found)
        except RecursionError:
            return None
        if not source or MAIN_GUARD in source:
            return None
        return TestFunction(name, source, is_method=any(found in body for body in _solutions(tree)))


def _solutions(tree: ast.Module) -> list[list[ast.stmt]]:
    return [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Solution"]
