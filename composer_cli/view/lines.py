"""Texts for pages: Markdown and code in colour, failures in the output of tests, differences between two texts.

Models wrote these texts. Everything is escaped, nothing in them becomes a link or an image, and what could keep a lexer
busy (one long line of a diff took 272 s) stays plain.
"""

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher, unified_diff
from functools import cache
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

BAD_LINE = re.compile(r"^(?:FAILED|FAIL|ERROR|E  |Traceback|\w*Error\b|\w*Exception\b)")
WORD = re.compile(r"\w+|\s+|[^\w\s]")
LONGEST_LINE = 2_000
"""Characters of a line in which single words are compared, and of the lines of a text that is highlighted."""
LONGEST_TEXT = 20_000
"""Characters of a text that is highlighted or rendered."""
DEEPEST = 15
"""Levels of quotes and lists that are rendered, less than the limit of the parser (20)."""
LEXERS = {"bash": "bash", "sh": "bash", "shell": "bash", "python": "python", "py": "python", "json": "json"}
"""The words after a fence that choose a lexer; none is guessed. Diffs have marks of our own."""
FORMATTER = HtmlFormatter(nowrap=True)
NO_MARKDOWN = ("link", "image", "autolink", "reference", "html_inline", "html_block", "entity", "escape", "lheading")
"""Rules that are off: what leads elsewhere, and what would hide characters that the model wrote."""


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


def markdown(text: str) -> Markup:
    """Return a message as HTML: Markdown without links, images and HTML, its code in colour; a long one as it is."""
    renderer = _renderer()
    tokens = [] if _is_long(text) else renderer.parse(text)
    # The parser leaves out what is nested deeper than its limit.
    if max((token.level for token in tokens), default=DEEPEST) >= DEEPEST:
        return Markup("<pre>{}</pre>").format(text)
    page = renderer.renderer.render(tokens, renderer.options, {})
    return Markup('<div class="md">{}</div>').format(Markup(page))  # noqa: S704 - html is off


@cache
def _renderer() -> MarkdownIt:
    options = {"html": False, "breaks": True, "highlight": lambda code, language, _: str(highlighted(code, language))}
    return MarkdownIt("commonmark", options).enable("table").disable(NO_MARKDOWN)


def highlighted(code: str, language: str) -> Markup:
    """Return code as HTML with classes for its tokens; escaped alone where the language is unknown or it is long."""
    if _is_long(code):
        return escape(code)
    if language == "diff":
        tag = Markup('<span class="{}">{}</span>').format
        return Markup("\n").join(tag(one.kind, one.line) if one.kind else one.line for one in marked(code))
    if language not in LEXERS:
        return escape(code)
    lexer = get_lexer_by_name(LEXERS[language], stripnl=False, ensurenl=False)
    return Markup(highlight(code, lexer, FORMATTER))  # noqa: S704 - Pygments escapes what it puts into its spans


def _is_long(text: str) -> bool:
    return len(text) > LONGEST_TEXT or max(map(len, text.split("\n"))) > LONGEST_LINE


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
