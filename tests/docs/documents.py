"""The documents and their blocks, as the tests of documents read them."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_cli.app import click_command

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/**/*.md"))]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "artifacts" / "README.md",
    ROOT / "examples" / "README.md",
    *PAGES,
]
BIN = Path(sys.executable).parent
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>\w+) -->\n)?"
    r'^(?P<fence>```+)(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=fence)$',
    re.M | re.S,
)
FENCE = re.compile(r"^(```+)([^\n]*)\n.*?^\1$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is, its mark, and the line that it begins on."""

    language: str
    title: str | None
    mark: str | None
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """The blocks of a document that have a language; those without one are pictures."""
    text = path.read_text()
    return [
        Block(m["language"], m["title"], m["mark"], m["text"], text.count("\n", 0, m.start()) + 1)
        for m in BLOCK.finditer(text)
    ]


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell block, comments and line continuations taken care of."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def find(words: list[str]) -> tuple[str, Any, list[str]]:
    """The command that words name, and the words after its name; probe's commands go by their stage's name."""
    commands_ = click_command().commands
    if words[0] == "probe" and len(words) > 1:
        return f"probe-{words[1]}", commands_["probe"].commands[words[1]], words[2:]
    if (both := " ".join(words[:2])) in commands_:  # `tasks check`
        return both, commands_[both], words[2:]
    return words[0], commands_[words[0]], words[1:]
