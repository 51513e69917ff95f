"""What to remove as a model proposes it: what it is shown of a package, and what of its answer can be tried.

A question shows a part of one split's half, names and sizes and no code, so that no proposal has to cross the halves.
What comes back is only ever compared with names that the package has; what can be tried is then validated as any other
removal. The same answers in the same order give the same removals.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stages.envs.base import Split
from stages.envs.feature_deletion import selection
from stages.envs.feature_deletion.definitions import Definition, definitions
from stages.envs.feature_deletion.selection import MAX_LINES, MIN_LINES, Difficulty, Kind, Removal
from stages.messages import Message
from stages.runs import store

A_QUESTION = 4
"""So many features are asked for at once; what an answer holds beyond them is not read."""
MAX_SYMBOLS = 8
PAGE_CHARS = 12_000
"""So much of a package's outline does one question show."""
REMEMBERED = 40
LONGEST_NAME = 120
LONGEST_ANSWER = 100_000
"""In characters; what comes after them is not read."""
BEGINNINGS = 5
"""So many objects of an answer are looked into."""
BEGINNING = re.compile(r'\{\s*"features"\s*:')

QUESTION = """\
Below are functions and classes of the Python package {package}: their lines of code, and how many of its tests \
execute them.

Name features that an engineer could be asked to write again after they were deleted. A feature is something that the \
package does for its users, carried by one to {symbols} of these symbols that belong together. Without them tests must \
fail, and the rest of the package must still be importable. A feature that a constant could stand in for is none.

Answer with one JSON object and nothing else, with up to {number} features:
{{"features": [{{"feature": "what it does, in a few words", "symbols": ["package/module.py:function", \
"package/module.py:Class.method"]}}]}}

{outline}
"""
BEFORE = "\nThese were named before; name others:\n{named}\n"


@dataclass(frozen=True)
class Proposal:
    """One feature of an answer: what can be tried of it, or the reason why nothing can."""

    feature: str
    removal: Removal | None
    reason: str | None = None


class Proposals:
    """The questions about one package, and the proposals in their answers; call `question` and `take` in turns.

    `lines` as in `Baseline`: what its tests execute.
    """

    def __init__(
        self,
        package: str,
        texts: Mapping[str, str],
        lines: Mapping[str, Mapping[int, frozenset[str]]],
        *,
        seed: int,
        split: Split | None,
        difficulties: Sequence[Difficulty],
    ) -> None:
        self._package, self._seed, self._difficulties, self._lines = package, seed, tuple(difficulties), lines
        halves = selection.halved(selection.usable(texts, lines)).items()
        self._halves: dict[Split, list[Definition]] = {half: [d for d in members if d.code] for half, members in halves}
        shown = [(half, members) for half, members in self._halves.items() if members and split in (None, half)]
        self._pages = [(half, page) for half, members in shown for page in self._paged(members)]
        self._usable = {_name(d) for members in self._halves.values() for d in members}
        self._known: dict[str, list[Definition]] = {}
        for path in sorted(texts):
            for definition in definitions(path, texts[path]):
                self._known.setdefault(_name(definition), []).append(definition)
        self._asked = 0
        self._named: set[tuple[str, ...]] = set()
        self.made: list[Proposal] = []

    @property
    def removals(self) -> list[Removal]:
        """What can be tried so far, in order."""
        return [one.removal for one in self.made if one.removal is not None]

    def question(self) -> list[Message]:
        """The next question; none where no test executes anything that could go."""
        if not self._pages:
            return []
        half, outline = self._page()
        text = QUESTION.format(package=self._package, symbols=MAX_SYMBOLS, number=A_QUESTION, outline=outline)
        named = [", ".join(removal.names) for removal in self.removals if removal.split == half][-REMEMBERED:]
        text += BEFORE.format(named="\n".join(f"- {names}" for names in named)) if named else ""
        return [{"role": "user", "content": text}]

    def take(self, answer: str) -> list[Proposal]:
        """What an answer to the last question proposes."""
        half, _ = self._page()
        self._asked += 1
        features = _features(answer)
        if features is None:
            found = [Proposal("", None, "an answer holds no list of features")]
        else:
            found = [self._proposal(feature, half) for feature in features[:A_QUESTION]]
            found = found or [Proposal("", None, "an answer names no feature")]
            if len(features) > A_QUESTION:
                found.append(Proposal("", None, f"an answer names more features than were asked for: {len(features)}"))
        self.made += found
        return found

    def _page(self) -> tuple[Split, str]:
        return self._pages[self._asked % len(self._pages)]

    def _paged(self, members: Sequence[Definition]) -> Iterator[str]:
        """The outline of a half, in pages that no question is too long for."""
        page: list[str] = []
        for definition in members:
            tests = len(set().union(*(self._lines.get(definition.path, {}).get(n, ()) for n in definition.covers())))
            line = f"{_name(definition)} ({definition.kind}, {len(definition.code)} lines, {tests} tests)"
            if page and sum(map(len, page)) + len(line) > PAGE_CHARS:
                yield "\n".join(page)
                page = []
            page.append(line)
        yield "\n".join(page)

    def _proposal(self, given: Any, half: Split) -> Proposal:
        feature = printable(given.get("feature")) if isinstance(given, dict) else ""
        symbols = given.get("symbols") if isinstance(given, dict) else None
        if not isinstance(symbols, list) or not 1 <= len(symbols) <= MAX_SYMBOLS:
            return Proposal(feature, None, f"no list of one to {MAX_SYMBOLS} symbols")
        wanted = [symbol.strip() if isinstance(symbol, str) else "" for symbol in symbols]
        for symbol in wanted:
            if symbol not in self._known:
                return Proposal(feature, None, f"the package has no such symbol: {printable(symbol)}")
            if symbol not in self._usable:
                return Proposal(feature, None, f"no test executes a symbol's code: {symbol}")
        return self._tried(feature, _parts(wanted, self._known), half)

    def _tried(self, feature: str, parts: tuple[Definition, ...], half: Split) -> Proposal:
        mine = {(d.path, d.top) for d in self._halves[half]}
        for part in parts:
            if (part.path, part.top) not in mine:
                return Proposal(feature, None, f"a symbol of the other split: {_name(part)}")
        kind: Kind = parts[0].kind if len(parts) == 1 else "cluster"
        size = sum(len(part.code) for part in parts)
        if not MIN_LINES[kind] <= size <= MAX_LINES:
            return Proposal(feature, None, f"not {MIN_LINES[kind]} to {MAX_LINES} lines of code: {size}")
        names = tuple(map(_name, parts))
        if names in self._named:
            return Proposal(feature, None, "named before")
        self._named.add(names)
        drawn = int(store.digest([self._seed, *names])[:8], 16) % len(self._difficulties)
        return Proposal(feature, Removal(kind, self._difficulties[drawn], half, parts, feature or ", ".join(names)))


def printable(text: Any) -> str:
    """What can be shown of a word that a model wrote: one line, not long, no signs that steer a terminal."""
    return "".join(sign for sign in text if sign.isprintable())[:LONGEST_NAME].strip() if isinstance(text, str) else ""


def _name(definition: Definition) -> str:
    return f"{definition.path}:{definition.qualname}"


def _parts(wanted: Sequence[str], known: Mapping[str, Sequence[Definition]]) -> tuple[Definition, ...]:
    """The definitions of symbols by path and place; those inside a class that goes as a whole go with it."""
    chosen = {(d.path, d.node.lineno): d for symbol in wanted for d in known[symbol]}
    whole = {(d.path, d.qualname) for d in chosen.values() if d.kind == "class"}
    inside = {place for place, d in chosen.items() if d.kind != "class" and (d.path, d.top) in whole}
    return tuple(chosen[place] for place in sorted(chosen.keys() - inside))


def _features(answer: str) -> list[Any] | None:
    """The list in an answer, whatever stands around the object; None where there is none."""
    read = answer[:LONGEST_ANSWER]
    for beginning in islice(BEGINNING.finditer(read), BEGINNINGS):
        try:
            found, _ = json.JSONDecoder().raw_decode(read, beginning.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found["features"], list):
            return found["features"]
    return None
