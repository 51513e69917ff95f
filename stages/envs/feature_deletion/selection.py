"""What to remove from a package: single functions, whole classes, clusters of functions that call each other.

The order is drawn once from a seed, so a longer list starts with the shorter one. Every definition at the top of a
module belongs to the train or to the eval split by its name, and a removal never crosses them.
"""

import ast
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.envs.base import Split
from stages.envs.feature_deletion.definitions import Definition, Keep, definitions, without
from stages.envs.repo import trees
from stages.envs.repo.protected_files import is_test
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


def sources(package: Mapping[str, trees.File]) -> dict[str, str]:
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
