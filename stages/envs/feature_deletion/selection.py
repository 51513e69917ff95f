"""Select the definitions to remove from a package: functions, classes, clusters of functions that call each other.

`draw_removals` draws their order once from a seed, so a longer list starts with the shorter one. Every definition at
the top of a module belongs to the train or to the eval split by its name, and a removal never crosses the splits.

`Proposals` lets a model propose features instead. A question shows a part of one split: names and sizes, no code. The
answer is only compared with names that the package has, and its removals are validated as drawn ones are. The same
answers in the same order give the same removals.
"""

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from composer_stages.data_files import load_toml
from composer_stages.envs.base import Split
from composer_stages.envs.feature_deletion.definitions import STUB, Definition, Keep, apply_edits, definitions
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.guest.composer_rules import is_test
from composer_stages.errors import Refusal
from composer_stages.messages import Message
from composer_stages.runs import store
from composer_stages.words import Sentence

Kind = Literal["function", "class", "cluster"]
Difficulty = Literal["easy", "medium", "hard"]
KEEP: dict[Difficulty, Keep] = {
    "easy": Keep(docstring=True, signature=True),
    "medium": Keep(docstring=False, signature=True),
    "hard": Keep(docstring=False, signature=False),
}
MIN_LINES: dict[Kind, int] = {"function": 3, "class": 6, "cluster": 6}
"""Fewest lines of code to remove: getters and one-liners are no task."""
MAX_LINES = 400
WEIGHTS: dict[Kind, int] = {"function": 4, "class": 1, "cluster": 2}
"""Weight of a kind in the draw while others are left."""
LARGEST_CLUSTER = 4
EVAL_SHARE = 4
"""One definition of this many is for evaluation."""
NOT_PACKAGE = frozenset({"setup.py", "conf.py", "noxfile.py", "fabfile.py", "tasks.py"})
NOT_PACKAGE_FOLDERS = frozenset(
    {"docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "scripts", "tools"}
)

A_QUESTION = 4
"""Features asked for at once; further ones in an answer are not read."""
MAX_SYMBOLS = 8
PAGE_CHARS = 12_000
"""Characters of a package's outline in one question."""
REMEMBERED = 40
"""Earlier proposals that a question lists."""
LONGEST_NAME = 120
LONGEST_ANSWER = 100_000
"""Characters of an answer that are read."""
BEGINNINGS = 5
"""Objects of an answer that are parsed."""
BEGINNING = re.compile(r'\{\s*"features"\s*:')

PROMPTS = load_toml(__package__, "prompts.toml")

CoveredLines = Mapping[str, Mapping[int, frozenset[str]]]
"""File -> line -> node ids of the tests that execute it."""


class Removal:
    """Definitions to remove together. `feature`: the name that a model gave them when it proposed them.

    names: `path:qualname` of every part. family: the definitions at the top of their modules that lose code.
    identity: twelve hex digits of the digest of the parts, their lines and the difficulty.
    """

    def __init__(
        self, kind: Kind, difficulty: Difficulty, split: Split, parts: tuple[Definition, ...], feature: str = ""
    ) -> None:
        self.kind, self.difficulty, self.split, self.parts, self.feature = kind, difficulty, split, parts, feature
        self.names = [part.symbol for part in parts]
        # Statistics cluster tasks by family: removals from one class or function share their code and tests.
        self.family = "+".join(sorted({f"{part.path}:{part.top}" for part in parts}))
        # Positions and no code: `base_commit` is the digest of this identity and of all files of the package.
        positions = [[part.path, part.qualname, part.node.lineno] for part in parts]
        self.identity = store.digest([*positions, difficulty])[:12]

    def writes(self, texts: Mapping[str, str], body: str | None = None) -> dict[str, str]:
        """Return path -> text of every file that changes; with `body` this line replaces every body, headers kept."""
        # A trivial body needs the signature even where the task hides it: `{first}` names an argument of it.
        keep, statement = (KEEP[self.difficulty], STUB) if body is None else (KEEP["easy"], body)
        return {
            path: apply_edits(
                texts[path], [edit for p in self.parts if p.path == path for edit in p.edits(keep, statement)]
            )
            for path in sorted({part.path for part in self.parts})
        }


@lru_cache(maxsize=16)
def read_sources(root: Path) -> dict[str, str]:
    """Read the Python files of a package, by path, without tests, documentation and scripts.

    Cached by folder, since every rollout needs them to know what to hide; the copy at `root` is never written to.
    """
    texts = {}
    for path in trees.walk(root):
        *folders, name = path.split("/")
        is_outside = name in NOT_PACKAGE or NOT_PACKAGE_FOLDERS & set(folders[:1])
        if name.endswith(".py") and not is_outside and not is_test(path) and (file := trees.read(root, path)):
            try:
                texts[path] = file.data.decode()
            except UnicodeDecodeError:
                continue
    return texts


def draw_removals(
    texts: Mapping[str, str],
    lines: CoveredLines,
    *,
    seed: int,
    split: Split | None,
    kinds: Sequence[Kind],
    difficulties: Sequence[Difficulty],
) -> list[Removal]:
    """Draw all removals of code that tests execute, in an order that mixes kinds and difficulties."""
    rng = random.Random(f"feature-deletion/{seed}")  # noqa: S311 - draws data, no secret
    by_split = split_definitions(texts, lines)
    pools: dict[Kind, list[tuple[Split, tuple[Definition, ...]]]] = {}
    for kind in kinds:
        pool = pools[kind] = []
        for half, members in by_split.items():
            if split not in (None, half):
                continue
            if kind == "cluster":
                pool += ((half, parts) for parts in _clusters(members, rng))
            else:
                candidates = (d for d in members if d.kind == kind and MIN_LINES[kind] <= len(d.code) <= MAX_LINES)
                pool += ((half, (definition,)) for definition in candidates)
    for pool in pools.values():
        rng.shuffle(pool)
    removals: list[Removal] = []
    while remaining := [kind for kind, pool in pools.items() if pool]:
        kind = rng.choices(remaining, [WEIGHTS[kind] for kind in remaining])[0]
        half, parts = pools[kind].pop()
        removals.append(Removal(kind, rng.choice(list(difficulties)), half, parts))
    return removals


def covering_tests(definition: Definition, lines: CoveredLines) -> set[str]:
    """Return the node ids of the tests that execute any line of a definition's bodies."""
    by_line = lines.get(definition.path, {})
    return set().union(*(by_line.get(line, ()) for line in definition.body_lines))


def split_definitions(texts: Mapping[str, str], lines: CoveredLines) -> dict[Split, list[Definition]]:
    """Return the definitions of each split of which some test executes a line, by path and position.

    One in four names at the top of a module is for evaluation.
    """
    members = [definition for path in sorted(texts) for definition in definitions(path, texts[path])]
    usable = [definition for definition in members if covering_tests(definition, lines)]
    # By the digest of the name alone: a seed must never move a definition from one split to the other.
    tops = sorted({(d.path, d.top) for d in usable}, key=lambda top: store.digest(list(top)))
    eval_tops = set(tops[: -(-len(tops) // EVAL_SHARE)])
    return {
        "train": [d for d in usable if (d.path, d.top) not in eval_tops],
        "eval": [d for d in usable if (d.path, d.top) in eval_tops],
    }


def _clusters(usable: Sequence[Definition], rng: random.Random) -> Iterator[tuple[Definition, ...]]:
    """Yield clusters: a function that calls removable ones, with a few that it reaches; each cluster once."""
    functions = [d for d in usable if d.kind == "function" and d.code]
    calls = call_graph(functions)
    previous = set()
    for root in range(len(functions)):
        size = rng.randint(2, LARGEST_CLUSTER)
        cluster, queue = [root], list(calls[root])
        while queue and len(cluster) < size:
            callee = queue.pop(0)
            if callee not in cluster:
                cluster.append(callee)
                queue += calls[callee]
        members = frozenset(cluster)
        parts = tuple(functions[i] for i in sorted(members))
        num_lines = sum(len(part.code) for part in parts)
        if len(members) > 1 and members not in previous and MIN_LINES["cluster"] <= num_lines <= MAX_LINES:
            previous.add(members)
            yield parts


def call_graph(functions: Sequence[Definition]) -> list[list[int]]:
    """Return for each function the indices of the others that it calls.

    They are found by name: a function of its module or a method of its class first, else the only one of that name.
    """
    by_name: dict[str, list[int]] = {}
    for number, function in enumerate(functions):
        by_name.setdefault(function.qualname.rpartition(".")[2], []).append(number)
    graph = []
    for number, caller in enumerate(functions):
        callees: list[int] = []
        for call in ast.walk(caller.node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                name, is_method = call.func.id, False
            elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name, is_method = call.func.attr, True
            else:
                continue
            near = [i for i in by_name.get(name, ()) if i != number and ("." in functions[i].qualname) == is_method]
            local = [
                i
                for i in near
                if functions[i].path == caller.path and (not is_method or functions[i].top == caller.top)
            ]
            matches = local or (near if len(near) == 1 else [])
            callees += [i for i in matches[:1] if i not in callees]
        graph.append(callees)
    return graph


class NotTried(Refusal):
    """A feature of an answer cannot be tried; the text is the reason."""


class Proposals:
    """The questions about one package, and the proposals in their answers; call `question` and `take` in turns.

    `lines` as in `Baseline`: the lines that its tests execute. `removals` are the features so far that can be tried, in
    order, `refused` the reasons of the others.
    """

    def __init__(
        self,
        package: str,
        texts: Mapping[str, str],
        lines: CoveredLines,
        *,
        seed: int,
        split: Split | None,
        difficulties: Sequence[Difficulty],
    ) -> None:
        self._package, self._seed, self._difficulties, self._lines = package, seed, tuple(difficulties), lines
        halves = split_definitions(texts, lines).items()
        self._halves: dict[Split, list[Definition]] = {half: [d for d in members if d.code] for half, members in halves}
        outlines = [(half, members) for half, members in self._halves.items() if members and split in (None, half)]
        self._pages = [(half, page) for half, members in outlines for page in self._paged(members)]
        self._usable = {definition.symbol for members in self._halves.values() for definition in members}
        self._known: dict[str, list[Definition]] = {}
        for path in sorted(texts):
            for definition in definitions(path, texts[path]):
                self._known.setdefault(definition.symbol, []).append(definition)
        self._asked = 0
        self._named: set[tuple[str, ...]] = set()
        self.removals: list[Removal] = []
        self.refused: list[str] = []

    def question(self) -> list[Message]:
        """Return the next question; an empty list where no test executes anything that could be removed."""
        if not self._pages:
            return []
        half, outline = self._pages[self._asked % len(self._pages)]
        prompts = PROMPTS["proposals"]
        text: str = prompts["question"].format(
            package=self._package, symbols=MAX_SYMBOLS, number=A_QUESTION, outline=outline
        )
        earlier_names = [", ".join(removal.names) for removal in self.removals if removal.split == half][-REMEMBERED:]
        text += (
            prompts["named_before"].format(named="\n".join(f"- {names}" for names in earlier_names))
            if earlier_names
            else ""
        )
        return [{"role": "user", "content": text}]

    def take(self, answer: str) -> None:
        """Add the features in an answer to the last question, those that can be tried and the refused ones."""
        half, _ = self._pages[self._asked % len(self._pages)]
        self._asked += 1
        features = _features(answer)
        if features is None:
            self.refused.append(Sentence("envs.feature_deletion.no-feature-list"))
            return
        if not features:
            self.refused.append(Sentence("envs.feature_deletion.no-feature-named"))
        for feature in features[:A_QUESTION]:
            try:
                self.removals.append(self._removal(feature, half))
            except NotTried as reason:
                self.refused.append(str(reason))
        if len(features) > A_QUESTION:
            self.refused.append(Sentence("envs.feature_deletion.too-many-features", num_features=len(features)))

    def _paged(self, members: Sequence[Definition]) -> Iterator[str]:
        """Yield the outline of a split in pages of at most PAGE_CHARS."""
        page: list[str] = []
        for definition in members:
            num_tests = len(covering_tests(definition, self._lines))
            line = f"{definition.symbol} ({definition.kind}, {len(definition.code)} lines, {num_tests} tests)"
            if page and sum(map(len, page)) + len(line) > PAGE_CHARS:
                yield "\n".join(page)
                page = []
            page.append(line)
        yield "\n".join(page)

    def _removal(self, entry: Any, half: Split) -> Removal:
        """Return the removal that one feature of an answer names; NotTried with the reason where there is none."""
        feature = printable(entry.get("feature")) if isinstance(entry, dict) else ""
        symbols = entry.get("symbols") if isinstance(entry, dict) else None
        if not isinstance(symbols, list) or not 1 <= len(symbols) <= MAX_SYMBOLS:
            raise NotTried("envs.feature_deletion.wrong-symbol-list", limit=MAX_SYMBOLS)
        symbol_names = [symbol.strip() if isinstance(symbol, str) else "" for symbol in symbols]
        for symbol in symbol_names:
            if symbol not in self._known:
                raise NotTried("envs.feature_deletion.unknown-symbol", symbol=printable(symbol))
            if symbol not in self._usable:
                raise NotTried("envs.feature_deletion.symbol-not-executed", symbol=symbol)
        # By position, so that the order of an answer makes no difference. Without methods of a class that goes as a
        # unit: their edits would overlap those of the class.
        by_position = {(d.path, d.node.lineno): d for symbol in symbol_names for d in self._known[symbol]}
        named = [by_position[position] for position in sorted(by_position)]
        classes = {(d.path, d.qualname) for d in named if d.kind == "class"}
        parts = tuple(d for d in named if d.kind == "class" or (d.path, d.top) not in classes)
        of_this_split = {(d.path, d.top) for d in self._halves[half]}
        if outside := [part for part in parts if (part.path, part.top) not in of_this_split]:
            raise NotTried("envs.feature_deletion.symbol-of-other-split", symbol=outside[0].symbol)
        kind: Kind = parts[0].kind if len(parts) == 1 else "cluster"
        num_lines, least = sum(len(part.code) for part in parts), MIN_LINES[kind]
        if not least <= num_lines <= MAX_LINES:
            raise NotTried("envs.feature_deletion.wrong-code-size", least=least, limit=MAX_LINES, num_lines=num_lines)
        names = tuple(part.symbol for part in parts)
        if names in self._named:
            raise NotTried("named before")
        self._named.add(names)
        difficulty = self._difficulties[int(store.digest([self._seed, *names])[:8], 16) % len(self._difficulties)]
        return Removal(kind, difficulty, half, parts, feature or ", ".join(names))


def printable(text: Any) -> str:
    """Return a model's text as one short line without terminal control characters."""
    return "".join(sign for sign in text if sign.isprintable())[:LONGEST_NAME].strip() if isinstance(text, str) else ""


def _features(answer: str) -> list[Any] | None:
    """Return the list of features in an answer, with any text around the object; None where there is none."""
    read = answer[:LONGEST_ANSWER]
    for beginning in islice(BEGINNING.finditer(read), BEGINNINGS):
        try:
            document, _ = json.JSONDecoder().raw_decode(read, beginning.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(document["features"], list):
            return document["features"]
    return None
