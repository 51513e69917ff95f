"""Search everything that an agent could read for pieces of code, from inside the agent's own sandbox.

    python3 scan.py NEEDLES.json ROOT...

NEEDLES.json is {"shingles": {shingle: [ids]}, "names": {"parent/stem" of a module: {id: [identifiers]}}, "width": n}.
Prints one JSON object {path: {id: matches}} of the files that hold any. A shingle is a run of `width` lines, each
without its blanks and comment signs; bytecode and type caches are searched for identifiers. Every byte of every text is
read, archives are unpacked, but shingles are made only of files that hold the longest line of a wanted one: 200 MB and
more a second.
"""

import json
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence

Names = Mapping[str, Mapping[str, Sequence[str]]]
Matches = dict[str, int]

SOURCES = (".py", ".pyi", ".pyx", ".txt", ".rst", ".md", ".patch", ".diff", ".orig", ".ipynb", ".html")
ZIPS = (".whl", ".zip", ".egg", ".pyz")
TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
COMPILED = (".pyc", ".pyo", ".so", ".json")  # mypy's cache is JSON: module.data.json.
SKIPPED = frozenset({"/proc", "/sys", "/dev", "/testbed"})
ALL_NAMES = -1
BIGGEST_BYTES = 64 << 20
"""Limit on a file, or on one in an archive."""
DECORATION = b" \t\f\v#*+-|"
# RuntimeError: zipfile raises it for an encrypted member. EOFError: gzip raises it for a truncated archive.
NOT_READABLE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, tarfile.TarError)


def main(request: str, roots: Sequence[str]) -> dict[str, Matches]:
    """Return the matches of every file below `roots` that has any, by path; `request` is the path of NEEDLES.json."""
    with open(request) as file:
        needles = json.load(file)
    wanted = {shingle.encode(): ids for shingle, ids in needles["shingles"].items()}
    longest = {max(shingle.split(b"\n"), key=len) for shingle in wanted}
    width: int = needles["width"]
    found: dict[str, Matches] = {}
    for path in paths_below(roots, os.path.dirname(request)):
        binary = path.endswith(COMPILED)
        for name, data in contents(path, needles["names"]):
            found[name] = compiled(name, data, needles["names"]) if binary else search(data, wanted, longest, width)
    return {name: matches for name, matches in found.items() if matches}


def paths_below(roots: Sequence[str], own: str) -> Iterator[str]:
    """Yield files below the roots, except the kernel's, the task's and this search's own. A root may be a file."""
    for root in roots:
        if os.path.isfile(root):
            yield root
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if os.path.join(folder, name) not in {*SKIPPED, own}]
            yield from (os.path.join(folder, name) for name in names)


def contents(path: str, modules: Names) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of a text, of each text in an archive, of what was compiled from a module of that name."""
    try:
        if path.endswith(ZIPS):
            with zipfile.ZipFile(path) as zip_file:
                for entry in zip_file.infolist():
                    if entry.filename.endswith(SOURCES) and entry.file_size <= BIGGEST_BYTES:
                        yield f"{path}!{entry.filename}", zip_file.read(entry)
        elif path.endswith(TARS):
            with tarfile.open(path) as tar_file:
                for member in tar_file:
                    is_text = member.isreg() and member.name.endswith(SOURCES) and member.size <= BIGGEST_BYTES
                    if is_text and (text := tar_file.extractfile(member)) is not None:
                        yield f"{path}!{member.name}", text.read()
        elif (
            (path.endswith(SOURCES) or (path.endswith(COMPILED) and not modules.keys().isdisjoint(module_of(path))))
            and os.path.isfile(path)
            and os.path.getsize(path) <= BIGGEST_BYTES
        ):
            with open(path, "rb") as file:
                yield path, file.read()
    except NOT_READABLE:
        return


def module_of(path: str) -> set[str]:
    """Return the names by which a compiled file is looked up: parent/stem, and /stem."""
    folder, _, name = path.rpartition("/")
    stem = name.partition(".")[0]
    parent = folder.removesuffix("/__pycache__").rpartition("/")[2]
    return {f"{parent}/{stem}", f"/{stem}"}


def search(data: bytes, wanted: Mapping[bytes, Sequence[str]], longest: set[bytes], width: int) -> Matches:
    """Return the number of shingles of each id in a text."""
    found: Matches = {}
    for shingle in wanted.keys() & shingles(data, width, longest):
        for identity in wanted[shingle]:
            found[identity] = found.get(identity, 0) + 1
    return found


def compiled(path: str, data: bytes, names: Names) -> Matches:
    """Return the ids, each with `ALL_NAMES`, of which a compiled file holds all identifiers."""
    found: Matches = {}
    for module in module_of(path):
        for identity, words in names.get(module, {}).items():
            if all(word.encode() in data for word in words):
                found[identity] = ALL_NAMES
    return found


def shingles(data: bytes, width: int, only: "set[bytes] | None" = None) -> set[bytes]:
    """Return the shingles of a text: runs of `width` lines, joined; blank lines do not count.

    A text that holds no line of `only` has none.
    """
    # Without blanks and comment signs, so that code which was indented or commented out is found as well.
    lines = data.replace(b"\r", b"\n").translate(None, DECORATION).split(b"\n")
    # Most files hold none of those lines, and joining no lines of theirs is what gives 200 MB a second.
    if only is not None and only.isdisjoint(lines):
        return set()
    filled = [line for line in lines if line]
    return set(map(b"\n".join, zip(*(filled[i:] for i in range(width)), strict=False)))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:])))
