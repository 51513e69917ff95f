"""Copies of the code that a task removed, which an agent could find instead of writing it.

Two searches: once for a package through everything its agents' sandbox shows (installed and vendored copies, wheels,
bytecode, type caches), which is then hidden, and for every task through the delivered tree. Code counts as found where
half of its shingles (runs of three lines) stand in one file.
"""

import ast
import json
import shlex
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.envs.feature_deletion import worker
from stages.envs.feature_deletion.definitions import Definition, definitions
from stages.envs.feature_deletion.guest.scan import ALL_NAMES, shingles
from stages.envs.feature_deletion.selection import Removal
from stages.envs.feature_deletion.worker import GUEST, LIMITS
from stages.envs.repo import trees
from stages.errors import InfrastructureError
from stages.runs import store
from stages.sandbox import open_sandbox

WIDTH = 3
SHARE = 0.5
SHORTEST_SHINGLE = 40
"""In bytes, without blanks: three lines that are shorter together occur in any code."""
SHORTEST_NAME = 4
FEWEST_NAMES = 6
TEXT = (".py", ".pyi", ".pyx", ".txt", ".rst", ".md", ".patch", ".diff", ".c", ".cpp", ".ipynb", ".html", ".json")

EVERYWHERE = {"bubblewrap": "/", "none": "$(python3 -c 'import sys; print(*sys.path[1:])')"}
"""Without a sandbox: what Python imports from, not this whole machine."""

Places = dict[str, list[str]]
"""Key of a definition -> files that hold a copy of it."""


def key(definition: Definition) -> str:
    """What identifies a definition within its package."""
    return f"{definition.path}:{definition.qualname}:{definition.node.lineno}"


def needles(definition: Definition) -> set[bytes]:
    """The shingles of its bodies, comments included as a copy would have them; a body shorter than one has none."""
    return {
        shingle
        for body in definition.bodies
        for shingle in shingles("\n".join(body).encode(), WIDTH)
        if len(shingle) >= SHORTEST_SHINGLE
    }


@dataclass(frozen=True)
class Survey:
    """`hidden` are files that the sandbox must not show; `places` is where copies stand all the same."""

    hidden: tuple[Path, ...]
    places: Places

    def of(self, removal: Removal) -> list[str]:
        """Where copies of a removal's parts stand."""
        return sorted({path for part in removal.parts for path in self.places.get(key(part), ())})


_lock = threading.Lock()
_surveys: dict[str, Survey] = {}


def survey(sandbox: str, texts: Mapping[str, str], requirements: Path | None, roots: Sequence[Path] = ()) -> Survey:
    """Search what the sandbox shows beside the task's own tree, once for a package in this process.

    `texts`: path -> text of the package's own files. `requirements`: the folder with what its tests import beside it.
    `roots`: search below these alone. `InfrastructureError` when the search does not finish.
    """
    identity = store.digest([sandbox, dict(texts), str(requirements), [str(root) for root in roots]])
    with _lock:
        if identity not in _surveys:
            _surveys[identity] = _survey(sandbox, texts, requirements, roots)
        return _surveys[identity]


def _survey(sandbox: str, texts: Mapping[str, str], requirements: Path | None, roots: Sequence[Path]) -> Survey:
    """Search; hide what can be hidden, and look whether it is."""
    places = copies(sandbox, texts, requirements, roots=roots)
    found = sorted({Path(path.partition("!")[0]) for paths in places.values() for path in paths})
    hidden = tuple(path for path in found if sandbox == "bubblewrap" and not _needed(path, requirements))
    return Survey(hidden, copies(sandbox, texts, requirements, hidden, roots=found) if hidden else places)


def _needed(path: Path, requirements: Path | None) -> bool:
    """Whether the sandbox needs the file to run Python or tests."""
    own = [Path(sysconfig.get_path("stdlib")), *worker.readonly(requirements)]
    return any(path.is_relative_to(folder) or path.is_relative_to(folder.resolve()) for folder in own)


def copies(
    sandbox: str,
    texts: Mapping[str, str],
    requirements: Path | None,
    hidden: Sequence[Path] = (),
    roots: Sequence[Path] = (),
) -> Places:
    """Every definition that stands somewhere in what the sandbox shows, or below `roots`."""
    found = {key(d): d for path in sorted(texts) for d in definitions(path, texts[path]) if d.code}
    where = shlex.join(map(str, roots)) or EVERYWHERE[sandbox]
    with trees.scratch() as folder, trees.scratch() as empty:
        (folder / "needles.json").write_text(json.dumps(_request(found)))
        readonly = [GUEST, folder, *worker.readonly(requirements)]
        env = worker.environment(sandbox, requirements, empty)
        with open_sandbox(sandbox, empty, limits=LIMITS, readonly=readonly, env=env, hidden=hidden) as box:
            result = box.run(f"python3 -P {GUEST}/scan.py {folder}/needles.json {where}")
    try:
        return _places(json.loads(result.output), found)
    except ValueError:
        raise InfrastructureError(f"The search for leaks did not finish: {result.output[-500:]}") from None


def _places(matches: Mapping[str, Mapping[str, int]], found: Mapping[str, Definition]) -> Places:
    places: Places = {}
    for path, by_key in matches.items():
        for identity, number in by_key.items():
            if number == ALL_NAMES or number >= SHARE * len(needles(found[identity])):
                places.setdefault(identity, []).append(path)
    return places


def _request(found: Mapping[str, Definition]) -> dict[str, object]:
    shingles_: dict[str, list[str]] = {}
    names: dict[str, dict[str, list[str]]] = {}
    for identity, definition in found.items():
        for shingle in needles(definition):
            shingles_.setdefault(shingle.decode(), []).append(identity)
        if len(words := identifiers(definition.node)) >= FEWEST_NAMES:
            names.setdefault(_module(definition.path), {})[identity] = words
    return {"shingles": shingles_, "names": names, "width": WIDTH}


def _module(path: str) -> str:
    """parent/stem, without a parent for a module at an import root."""
    place = Path(path.removeprefix("src/")).with_suffix("")
    return f"{place.parent.name}/{place.name}"


def identifiers(node: ast.AST) -> list[str]:
    """The longer names in a body: bytecode and type caches keep them."""
    found = {getattr(inner, field, None) for inner in ast.walk(node) for field in ("id", "attr", "arg", "name")}
    return sorted(name for name in found if isinstance(name, str) and len(name) >= SHORTEST_NAME)


class Tree:
    """The shingles of every text file of a package, for one search a task."""

    def __init__(self, files: Mapping[str, trees.TreeFile]) -> None:
        self._present = {path: shingles(file.data, WIDTH) for path, file in files.items() if path.endswith(TEXT)}

    def copies(self, removal: Removal, writes: Mapping[str, str]) -> list[str]:
        """Files of the delivered tree that still hold code of a removed part."""
        present = self._present | {path: shingles(text.encode(), WIDTH) for path, text in writes.items()}
        wanted = [needles(part) for part in removal.parts]
        return [path for path in present if any(_stands(part, present[path]) for part in wanted)]


def _stands(wanted: set[bytes], present: set[bytes]) -> bool:
    return bool(wanted) and len(wanted & present) >= SHARE * len(wanted)
