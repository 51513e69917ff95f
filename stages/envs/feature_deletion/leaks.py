"""Search of the delivered tree for copies of removed code, which an agent could find instead of writing it.

Code counts as found where one file holds half of its shingles (runs of three lines). Copies elsewhere on this machine
are hidden by the name of the package (stages/envs/repo/hidden.py).
"""

from collections.abc import Mapping

from stages.envs.feature_deletion.definitions import Definition
from stages.envs.feature_deletion.selection import Removal
from stages.envs.repo import trees

WIDTH = 3
"""Lines of a shingle."""
SHARE = 0.5
SHORTEST_SHINGLE = 40
"""Bytes without blanks: three lines that are shorter together occur in any code."""
DECORATION = b" \t\f\v#*+-|"
TEXT = (".py", ".pyi", ".pyx", ".txt", ".rst", ".md", ".patch", ".diff", ".c", ".cpp", ".ipynb", ".html", ".json")


class PackageShingles:
    """The shingles of every text file of a package, computed once for the searches of all its tasks."""

    def __init__(self, files: Mapping[str, trees.TreeFile]) -> None:
        self._present = {path: _shingles(file.data) for path, file in files.items() if path.endswith(TEXT)}

    def copies(self, removal: Removal, writes: Mapping[str, str]) -> list[str]:
        """Return the files of the delivered tree that still hold code of a removed part."""
        present = self._present | {path: _shingles(text.encode()) for path, text in writes.items()}
        wanted = [part_shingles for part in removal.parts if (part_shingles := _of_bodies(part))]
        return [path for path, held in present.items() if any(len(part & held) >= SHARE * len(part) for part in wanted)]


def _of_bodies(definition: Definition) -> set[bytes]:
    """Return the shingles of its bodies, with comments as a copy would have them; a short body has none."""
    found = (_shingles("\n".join(body).encode()) for body in definition.bodies)
    return {shingle for each in found for shingle in each if len(shingle) >= SHORTEST_SHINGLE}


def _shingles(data: bytes) -> set[bytes]:
    """Return the shingles of a text, so that code which was indented or commented out is found as well."""
    lines = data.replace(b"\r", b"\n").translate(None, DECORATION).split(b"\n")
    filled = [line for line in lines if line]
    return set(map(b"\n".join, zip(*(filled[i:] for i in range(WIDTH)), strict=False)))
