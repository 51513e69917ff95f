"""Texts as lines with marks: what failed in the output of tests, what differs between two texts, word by word."""

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher, unified_diff
from itertools import pairwise
from typing import Any

BAD_LINE = re.compile(r"^(?:FAILED|FAIL|ERROR|E  |Traceback|\w*Error\b|\w*Exception\b)")
WORD = re.compile(r"\w+|\s+|[^\w\s]")
LONGEST_LINE = 2_000
"""Characters of a line in which single words are compared."""


@dataclass(frozen=True)
class MarkedLine:
    """One line of a block and its kind: "", "add", "del", "hunk" in a diff, "bad" in the output of tests.

    parts: the line's text in parts, each with whether it differs from the line in whose place it stands; empty where
    words were not compared.
    """

    line: str
    kind: str = ""
    parts: list[tuple[str, bool]] = field(default_factory=list)


def marked(text: str) -> list[MarkedLine]:
    """Return the lines of a text; in a diff added and removed lines are marked, elsewhere reports of failures."""
    lines = text.split("\n")
    is_diff = any(line.startswith("@@ ") for line in lines)
    found = []
    for line in lines:
        if not is_diff:
            kind = "bad" if BAD_LINE.match(line) else ""
        elif line.startswith(("+++", "---", "diff ", "@@")):
            kind = "hunk"
        else:
            kind = {"+": "add", "-": "del"}.get(line[:1], "")
        found.append(MarkedLine(line, kind))
    return found


def difference(rejected: Any, chosen: Any) -> list[MarkedLine]:
    """Return what differs from the rejected to the chosen action, line by line, with the differing words of a line.

    Empty for equal texts.
    """
    # Without the two lines that name files.
    lines = list(unified_diff(str(rejected).splitlines(), str(chosen).splitlines(), lineterm="", n=3))[2:]
    marked = [MarkedLine(line, {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "")) for line in lines]
    for index, (one, other) in enumerate(pairwise(marked)):
        around = [marked[place].kind if 0 <= place < len(marked) else "" for place in (index - 1, index + 2)]
        # Words are compared where one line took the place of one other.
        if (one.kind, other.kind) == ("del", "add") and around[0] != "del" and around[1] != "add":
            marked[index : index + 2] = _words(one, other)
    return marked


def _words(rejected: MarkedLine, chosen: MarkedLine) -> list[MarkedLine]:
    if max(len(rejected.line), len(chosen.line)) > LONGEST_LINE:
        return [rejected, chosen]
    before, after = (WORD.findall(one.line[1:]) for one in (rejected, chosen))
    parts: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([("-", False)], [("+", False)])
    for what, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for part, words in ((parts[0], before[a:b]), (parts[1], after[c:d])):
            if words:
                part.append(("".join(words), what != "equal"))
    return [MarkedLine(rejected.line, "del", parts[0]), MarkedLine(chosen.line, "add", parts[1])]
