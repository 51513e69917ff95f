"""Every message that the program refuses or fails with, read from the source, held against docs/troubleshooting.md.

    python docs/errors.py            # which messages have no entry, which entries have no message
    python docs/errors.py --all      # every message, with its place
    python docs/errors.py --skeleton # a table row for each message without an entry, to be filled in

An entry is a table row whose first cell is a message's fixed words in backticks; `…` stands for what varies. It
belongs to every message that holds these words in this order.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
RAISED = {
    *("ComposerError", "UsageError", "BadInput", "Incomplete", "InfrastructureError"),
    *("Retryable", "Rejected", "Fatal", "NoteChanged", "TooManyTasks", "interrupt_leaves"),
}
"""What is raised with a sentence for people. `Retryable` and `Rejected` are what a server did: a row's `error`."""
VALIDATORS = {"model_validator", "field_validator"}
"""Their `ValueError` is shown as a refused setting."""
SENTENCES = {
    ("composer_cli/printing.py", "sentence_and_code"),
    ("composer_cli/settings.py", "_problem"),
    ("stages/policy/base.py", "unbounded"),
}
"""Functions whose results, or the first of them, are shown as they are."""
HOLE = "…"
AT_LEAST = 6
"""Letters and more that an entry must give, so that it tells one message from another."""
ENTRY = re.compile(r"^\| `(.+?)` \|", re.M)


@dataclass(frozen=True)
class Message:
    """A message as it is written in the source, `…` where something is put in, and where it stands."""

    text: str
    place: str


@functools.cache
def messages() -> list[Message]:
    """All messages, in the order of the files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    functions: dict[str, list[ast.FunctionDef]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
    found = []
    for path, tree in trees.items():
        name = str(path.relative_to(ROOT))
        for line, argument in _said(name, tree):
            found += [Message(text, f"{name}:{line}") for text in _texts(argument, functions) if _letters(text)]
    return found


def sources() -> list[Path]:
    """The program's own files, without those that run inside a sandbox."""
    paths = [
        p
        for package in ("stages", "composer_cli", "composer_post_training")
        for p in sorted((ROOT / package).rglob("*.py"))
    ]
    paths.append(ROOT / "benchmarks" / "substrates.py")  # the code of a command
    return [p for p in paths if "guest" not in p.parts]


def _said(name: str, tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """The expressions that become a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in RAISED and node.args:
            yield node.lineno, node.args[-1]
        if isinstance(node, ast.FunctionDef) and _validates(node):
            yield from ((n.lineno, n.exc.args[0]) for n in ast.walk(node) if _value_error(n))
        if isinstance(node, ast.FunctionDef) and (name, node.name) in SENTENCES:
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            yield from ((value.lineno, value.elts[0] if isinstance(value, ast.Tuple) else value) for value in returned)


def _validates(node: ast.FunctionDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) in VALIDATORS for d in node.decorator_list)


def _value_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc.func) == "ValueError"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(node: ast.expr, functions: dict[str, list[ast.FunctionDef]], depth: int = 0) -> list[str]:
    """What an expression can say: a string, either arm of a choice, or whatever the function called returns."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, functions, depth), *_texts(node.orelse, functions, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_texts(side, functions, depth) or [HOLE] for side in (node.left, node.right)]
        return [left + right for left in sides[0] for right in sides[1]]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "strip":
        return _texts(node.func.value, functions, depth)
    if isinstance(node, ast.Call) and depth < 2:
        bodies = [n for f in functions.get(_name(node.func), []) for n in ast.walk(f) if isinstance(n, ast.Return)]
        return [text for n in bodies if n.value for text in _texts(n.value, functions, depth + 1)]
    return []


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text.replace(HOLE, ""))


def entries() -> list[str]:
    """The first cells of the page's tables."""
    return ENTRY.findall(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []


def belongs(entry: str, message: str) -> bool:
    """Whether a message holds the entry's fixed words in their order."""
    start = 0
    for part in filter(None, entry.split(HOLE)):
        place = message.find(part, start)
        if place < 0:
            return False
        start = place + len(part)
    return True


def without_entry() -> list[Message]:
    """Messages that the page does not explain."""
    known = entries()
    return [m for m in messages() if not any(belongs(entry, m.text) for entry in known)]


def without_message() -> list[str]:
    """Entries that fit no message, or fit too much to tell one from another."""
    texts = [m.text for m in messages()]
    return [e for e in entries() if _letters(e) < AT_LEAST or not any(belongs(e, text) for text in texts)]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z…)]\.) ", re.sub(r"\s+", " ", text))[0].replace("|", "\\|")


def main() -> int:
    """Print what was asked for; 1 when something is missing."""
    if "--all" in sys.argv:
        print("\n".join(f"{m.place}\t{m.text}" for m in messages()))
        return 0
    missing, stale = without_entry(), without_message()
    if "--skeleton" in sys.argv:
        print("\n".join(f"| `{_first_sentence(m.text)}` |  |  | <!-- {m.place} -->" for m in missing))
        return 0
    print("\n".join([*(f"no entry: {m.place}: {m.text}" for m in missing), *(f"no message: {e}" for e in stale)]))
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main())
