"""Search for copies of removed code, which an agent could find instead of writing it.

Two searches: `survey_copies`, once for a package, through everything that its agents' sandbox shows (installed and
vendored copies, wheels, bytecode, type caches), which is then hidden; and `PackageShingles.copies`, for every task,
through the delivered tree. Code counts as found where one file holds half of its shingles (runs of three lines).
"""

import ast
import json
import shlex
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.envs.feature_deletion.definitions import Definition, definitions
from stages.envs.feature_deletion.guest.scan import ALL_NAMES, shingles
from stages.envs.feature_deletion.selection import Removal
from stages.envs.feature_deletion.worker import GUEST, LIMITS
from stages.envs.repo import runner, trees
from stages.errors import InfrastructureError
from stages.runs import store

WIDTH = 3
"""Lines of a shingle."""
SHARE = 0.5
SHORTEST_SHINGLE = 40
"""Bytes without blanks: three lines that are shorter together occur in any code."""
SHORTEST_NAME = 4
FEWEST_NAMES = 6
TEXT = (".py", ".pyi", ".pyx", ".txt", ".rst", ".md", ".patch", ".diff", ".c", ".cpp", ".ipynb", ".html", ".json")

EVERYWHERE = {"bubblewrap": "/", "none": "$(python3 -c 'import sys; print(*sys.path[1:])')"}
"""Roots of the search; without a sandbox only the folders that Python imports from, not the machine."""

Places = dict[str, list[str]]
"""Key of a definition -> files that hold a copy of it."""


def definition_shingles(definition: Definition) -> set[bytes]:
    """Return the shingles of its bodies, with comments as a copy would have them; a short body has none."""
    return {
        shingle
        for body in definition.bodies
        for shingle in shingles("\n".join(body).encode(), WIDTH)
        if len(shingle) >= SHORTEST_SHINGLE
    }


@dataclass(frozen=True)
class LeakSurvey:
    """`hidden` are files that the sandbox must not show; `places` are those with copies that cannot be hidden."""

    hidden: tuple[Path, ...]
    places: Places

    def of(self, removal: Removal) -> list[str]:
        """Return the files with copies of a removal's parts."""
        return sorted({path for part in removal.parts for path in self.places.get(part.key, ())})


_lock = threading.Lock()
_surveys: dict[str, LeakSurvey] = {}


def survey_copies(
    sandbox: str, texts: Mapping[str, str], requirements: Path | None, roots: Sequence[Path] = ()
) -> LeakSurvey:
    """Search what the sandbox shows apart from the task's tree, once for a package in this process.

    What can be hidden is hidden, and a second search verifies it. Files that Python or the tests need are not hidden.

    `texts`: path -> text of the package's own files. `requirements`: the folder with what its tests import.
    `roots`: search only below these. `InfrastructureError` when the search does not finish.
    """
    identity = store.digest([sandbox, dict(texts), str(requirements), [str(root) for root in roots]])
    with _lock:
        if identity not in _surveys:
            places = find_copies(sandbox, texts, requirements, roots=roots)
            found = sorted({Path(path.partition("!")[0]) for paths in places.values() for path in paths})
            hidden: tuple[Path, ...] = ()
            # Hiding the standard library or the test runner would break every command; copies there remain `places`.
            if sandbox == "bubblewrap":
                needed = [Path(sysconfig.get_path("stdlib")), *runner.readonly_paths(requirements)]
                # os.walk follows no links, so the files that are found have their real paths.
                needed += [folder.resolve() for folder in needed]
                hidden = tuple(path for path in found if not any(path.is_relative_to(folder) for folder in needed))
            if hidden:
                places = find_copies(sandbox, texts, requirements, hidden, roots=found)
            _surveys[identity] = LeakSurvey(hidden, places)
        return _surveys[identity]


def find_copies(
    sandbox: str,
    texts: Mapping[str, str],
    requirements: Path | None,
    hidden: Sequence[Path] = (),
    roots: Sequence[Path] = (),
) -> Places:
    """Return the files with copies of definitions among what the sandbox shows, or below `roots`."""
    found = {d.key: d for path in sorted(texts) for d in definitions(path, texts[path]) if d.code}
    where = shlex.join(map(str, roots)) or EVERYWHERE[sandbox]
    with trees.scratch() as folder, trees.scratch() as empty:
        (folder / "needles.json").write_text(json.dumps(_request(found)))
        with runner.open_package_sandbox(
            sandbox, empty, LIMITS, requirements, readonly=(GUEST, folder), hidden=hidden
        ) as box:
            result = box.run(f"python3 -P {GUEST}/scan.py {folder}/needles.json {where}")
    try:
        matches = json.loads(result.output)
    except ValueError:
        raise InfrastructureError(f"The search for leaks did not finish: {result.output[-500:]}") from None
    places: Places = {}
    for path, by_key in matches.items():
        for key, number in by_key.items():
            if number == ALL_NAMES or number >= SHARE * len(definition_shingles(found[key])):
                places.setdefault(key, []).append(path)
    return places


def _request(found: Mapping[str, Definition]) -> dict[str, object]:
    """Return the request to guest/scan.py: shingles, and by module the longer names, which bytecode keeps."""
    by_shingle: dict[str, list[str]] = {}
    by_module: dict[str, dict[str, list[str]]] = {}
    fields = ("id", "attr", "arg", "name")
    for key, definition in found.items():
        for shingle in definition_shingles(definition):
            by_shingle.setdefault(shingle.decode(), []).append(key)
        names = {getattr(inner, field, None) for inner in ast.walk(definition.node) for field in fields}
        longer = sorted(name for name in names if isinstance(name, str) and len(name) >= SHORTEST_NAME)
        if len(longer) >= FEWEST_NAMES:
            # A module at an import root has no parent.
            module = Path(definition.path.removeprefix("src/")).with_suffix("")
            by_module.setdefault(f"{module.parent.name}/{module.name}", {})[key] = longer
    return {"shingles": by_shingle, "names": by_module, "width": WIDTH}


class PackageShingles:
    """The shingles of every text file of a package, computed once for the searches of all its tasks."""

    def __init__(self, files: Mapping[str, trees.TreeFile]) -> None:
        self._present = {path: shingles(file.data, WIDTH) for path, file in files.items() if path.endswith(TEXT)}

    def copies(self, removal: Removal, writes: Mapping[str, str]) -> list[str]:
        """Return the files of the delivered tree that still hold code of a removed part."""
        present = self._present | {path: shingles(text.encode(), WIDTH) for path, text in writes.items()}
        wanted = [part_shingles for part in removal.parts if (part_shingles := definition_shingles(part))]
        return [path for path, held in present.items() if any(len(part & held) >= SHARE * len(part) for part in wanted)]
