"""What to remove from a package: single functions, whole classes, clusters of functions that call each other.

The order is drawn once from a seed, so a longer list starts with the shorter one. Every definition at the top of a
module belongs to the train or to the eval split by its name, and a removal never crosses them.
"""

import ast
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from stages.envs.base import Split
from stages.envs.feature_deletion.definitions import Definition, Keep, definitions, without
from stages.envs.repo import trees
from stages.envs.repo.grading import is_test
from stages.messages import Message
from stages.runs import store

Kind = Literal["function", "class", "cluster"]
Difficulty = Literal["easy", "medium", "hard"]
KEEP: dict[Difficulty, Keep] = {
    "easy": Keep(docstring=True, signature=True),
    "medium": Keep(docstring=False, signature=True),
    "hard": Keep(docstring=False, signature=False),
}
MIN_LINES: dict[Kind, int] = {"function": 3, "class": 6, "cluster": 6}
"""Fewest lines of code that go: getters and one-liners are no task."""
MAX_LINES = 400
WEIGHTS: dict[Kind, int] = {"function": 4, "class": 1, "cluster": 2}
"""How often a kind is drawn while others are left."""
LARGEST_CLUSTER = 4
EVAL_SHARE = 4
"""One definition in so many is for evaluation."""
NOT_PACKAGE = frozenset({"setup.py", "conf.py", "noxfile.py", "fabfile.py", "tasks.py"})
NOT_PACKAGE_FOLDERS = frozenset(
    {"docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "scripts", "tools"}
)

Drawn = tuple[Split, tuple[Definition, ...]]


@dataclass(frozen=True)
class Removal:
    """Definitions to remove together, and what stays of them."""

    kind: Kind
    difficulty: Difficulty
    split: Split
    parts: tuple[Definition, ...]
    feature: str = ""
    """What a model that proposed it calls it."""

    @property
    def names(self) -> list[str]:
        """`path:qualname` of every part."""
        return [f"{part.path}:{part.qualname}" for part in self.parts]

    @property
    def identity(self) -> str:
        """Twelve hex digits: the parts, their lines and the difficulty."""
        return store.digest([[part.path, part.qualname, part.node.lineno] for part in self.parts] + [self.difficulty])[
            :12
        ]

    @property
    def family(self) -> str:
        """The definitions at the top of their modules that lose something."""
        return "+".join(sorted({f"{part.path}:{part.top}" for part in self.parts}))

    def writes(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Path -> text of every file that changes."""
        return {
            path: without(
                texts[path], [e for p in self.parts if p.path == path for e in p.edits(KEEP[self.difficulty])]
            )
            for path in sorted({part.path for part in self.parts})
        }

    def with_body(self, texts: Mapping[str, str], body: str) -> dict[str, str]:
        """The same files with one line in place of every body, signatures kept."""
        return {
            path: without(texts[path], [e for p in self.parts if p.path == path for e in p.edits(KEEP["easy"], body)])
            for path in sorted({part.path for part in self.parts})
        }

    def covering(self, lines: Mapping[str, Mapping[int, frozenset[str]]]) -> set[str]:
        """The tests that execute any line of any part."""
        return set().union(*(lines.get(p.path, {}).get(line, ()) for p in self.parts for line in p.covers()))


def sources(package: Mapping[str, trees.TreeFile]) -> dict[str, str]:
    """Path -> text of the package's own Python files: no tests, no documentation, no scripts around it."""
    found = {}
    for path, file in package.items():
        *folders, name = path.split("/")
        outside = name in NOT_PACKAGE or NOT_PACKAGE_FOLDERS & set(folders[:1])
        if name.endswith(".py") and not outside and not is_test(path):
            try:
                found[path] = file.data.decode()
            except UnicodeDecodeError:
                continue
    return found


def candidates(
    texts: Mapping[str, str],
    lines: Mapping[str, Mapping[int, frozenset[str]]],
    *,
    seed: int,
    split: Split | None,
    kinds: Sequence[Kind],
    difficulties: Sequence[Difficulty],
) -> list[Removal]:
    """Every removal to try, in an order that mixes kinds and difficulties; only code that tests execute."""
    rng = random.Random(f"feature-deletion/{seed}")  # noqa: S311 - draws data, no secret
    halves = [(half, members) for half, members in halved(usable(texts, lines)).items() if split in (None, half)]
    pools = {
        kind: [(half, parts) for half, members in halves for parts in _of_kind(kind, members, rng)] for kind in kinds
    }
    for pool in pools.values():
        rng.shuffle(pool)
    return [
        Removal(kind, rng.choice(list(difficulties)), half, parts) for kind, (half, parts) in _interleaved(pools, rng)
    ]


def usable(texts: Mapping[str, str], lines: Mapping[str, Mapping[int, frozenset[str]]]) -> list[Definition]:
    """What some test executes a line of, by path and place."""
    return [d for path in sorted(texts) for d in definitions(path, texts[path]) if _covered(d, lines)]


def halved(usable: Sequence[Definition]) -> dict[Split, list[Definition]]:
    """The definitions of each split; one in four classes and functions at the top of a module is for evaluation."""
    tops = sorted({(d.path, d.top) for d in usable}, key=lambda top: store.digest(list(top)))
    evaluated = set(tops[: -(-len(tops) // EVAL_SHARE)])
    return {
        "train": [d for d in usable if (d.path, d.top) not in evaluated],
        "eval": [d for d in usable if (d.path, d.top) in evaluated],
    }


def _covered(definition: Definition, lines: Mapping[str, Mapping[int, frozenset[str]]]) -> bool:
    return any(lines.get(definition.path, {}).get(line) for line in definition.covers())


def _of_kind(kind: Kind, usable: Sequence[Definition], rng: random.Random) -> Iterator[tuple[Definition, ...]]:
    if kind == "cluster":
        yield from _clusters(usable, rng)
        return
    for definition in usable:
        if definition.kind == kind and MIN_LINES[kind] <= len(definition.code) <= MAX_LINES:
            yield (definition,)


def _clusters(usable: Sequence[Definition], rng: random.Random) -> Iterator[tuple[Definition, ...]]:
    """For every function that calls others that may be removed: it and a few of what it reaches, each set once."""
    functions = [d for d in usable if d.kind == "function" and d.code]
    calls = call_graph(functions)
    seen = set()
    for root in range(len(functions)):
        members = _reached(root, calls, rng.randint(2, LARGEST_CLUSTER))
        chosen = tuple(functions[i] for i in sorted(members))
        size = sum(len(part.code) for part in chosen)
        if len(members) > 1 and members not in seen and MIN_LINES["cluster"] <= size <= MAX_LINES:
            seen.add(members)
            yield chosen


def _reached(root: int, calls: Sequence[Sequence[int]], size: int) -> frozenset[int]:
    members, waiting = [root], list(calls[root])
    while waiting and len(members) < size:
        callee = waiting.pop(0)
        if callee not in members:
            members.append(callee)
            waiting += calls[callee]
    return frozenset(members)


def call_graph(functions: Sequence[Definition]) -> list[list[int]]:
    """For each function the indices of the others that it calls.

    They are found by name: a function of its module or a method of its class first, else the only one of that name.
    """
    by_name: dict[str, list[int]] = {}
    for number, function in enumerate(functions):
        by_name.setdefault(function.qualname.rpartition(".")[2], []).append(number)
    return [_callees(number, functions, by_name) for number in range(len(functions))]


def _callees(number: int, functions: Sequence[Definition], by_name: Mapping[str, list[int]]) -> list[int]:
    caller = functions[number]
    found = []
    for name, is_method in _called(caller.node):
        near = [i for i in by_name.get(name, ()) if i != number and ("." in functions[i].qualname) == is_method]
        own = [
            i for i in near if functions[i].path == caller.path and (not is_method or functions[i].top == caller.top)
        ]
        chosen = own or (near if len(near) == 1 else [])
        found += [i for i in chosen[:1] if i not in found]
    return found


def _called(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names that are called, and whether as an attribute."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            yield call.func.id, False
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            yield call.func.attr, True


def _interleaved(pools: Mapping[Kind, Iterable[Drawn]], rng: random.Random) -> Iterator[tuple[Kind, Drawn]]:
    """Draw from the pools by weight until all are empty."""
    left = {kind: list(pool) for kind, pool in pools.items()}
    while open_ := [kind for kind, pool in left.items() if pool]:
        kind = rng.choices(open_, [WEIGHTS[kind] for kind in open_])[0]
        yield kind, left[kind].pop()


# ---- proposals
# What to remove as a model proposes it: what it is shown of a package, and what of its answer can be tried.
#
# A question shows a part of one split's half, names and sizes and no code, so that no proposal has to cross the
# halves.
# What comes back is only ever compared with names that the package has; what can be tried is then validated as any
# other
# removal. The same answers in the same order give the same removals.

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
        halves = halved(usable(texts, lines)).items()
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
