"""A package to make tasks from: a folder or an sdist, copied without its history and caches, never built or run."""

import email.parser
import re
import tomllib
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from stages.envs import folders
from stages.envs.folders import write
from stages.envs.repo import trees
from stages.envs.repo.trees import ARCHIVE_ENDINGS, extract_archive
from stages.errors import BadInput
from stages.runs import store

PRIVATE = frozenset({"venv", ".venv", "env", ".env", "node_modules", ".idea", ".vscode", ".claude"})
BUILT_AT_TOP = frozenset({"build", "dist", "wheelhouse"})
LEFTOVERS = (
    *trees.COMPILED,
    ".egg-info",
    ".dist-info",
    ".whl",
    ".egg",
    ".tar.gz",
    ".orig",
    ".rej",
    ".swp",
    ".coverage",
)


@dataclass(frozen=True)
class Package:
    """A clean copy below `root`, which nobody writes to."""

    name: str
    version: str
    root: Path

    @property
    def label(self) -> str:
        """Name and version, fit for an identifier."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", f"{self.name}-{self.version}")

    @cached_property
    def sha256(self) -> str:
        """The digest of all files."""
        return store.folder_sha256(self.root)


def unpack(source: Path, root: Path) -> Package:
    """Copy a folder, or unpack an archive, into the empty folder `root`; `BadInput` where it is neither or damaged."""
    if source.is_dir():
        top = source
        _copy(source, root)
    elif source.name.endswith(ARCHIVE_ENDINGS) and source.is_file():
        with trees.scratch() as raw:
            top = extract_archive(source, raw)
            _copy(top, root)
    else:
        raise BadInput(
            f"The package {str(source)!r} is neither a folder nor an archive ({', '.join(ARCHIVE_ENDINGS)}). "
            "Give one of them."
        )
    return _described(root, _bare(source.name))


def _bare(name: str) -> str:
    """A file's name without what says that it is an archive."""
    return next((name.removesuffix(ending) for ending in ARCHIVE_ENDINGS if name.endswith(ending)), name)


def _copy(top: Path, root: Path) -> None:
    """Into `root`; a folder that is itself an importable package goes one level deeper, so that it can be imported."""
    target = root / top.name if (top / "__init__.py").exists() else root
    folders.copy(top, target, _left_behind)


def _left_behind(path: str, is_folder: bool) -> bool:
    name = PurePosixPath(path).name
    if is_folder:
        at_top = path == name and name in BUILT_AT_TOP
        return at_top or name in trees.CACHES | trees.HISTORY | PRIVATE or name.endswith((".egg-info", ".dist-info"))
    return name.endswith(LEFTOVERS)


def _described(root: Path, fallback: str) -> Package:
    """Name and version as the package states them; its metadata without its code is left for `importlib.metadata`."""
    name, version = (_safe(part) for part in _stated(root) or _guessed(fallback))
    metadata = f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info/METADATA"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(root, metadata, text.encode(), 0o644)
    return Package(name, version, root)


def _safe(stated: str) -> str:
    """A name or version in the characters that packaging allows, others as one dash: it becomes part of a path."""
    return re.sub(r"[^A-Za-z0-9._+!-]+", "-", stated).strip("-.") or "0"


def _stated(root: Path) -> tuple[str, str] | None:
    if (root / "PKG-INFO").is_file():
        fields = email.parser.HeaderParser().parsestr((root / "PKG-INFO").read_text(errors="replace"))
        if fields["Name"] and fields["Version"]:
            return fields["Name"], fields["Version"]
    for read in (_from_pyproject, _from_setup_cfg):
        if (found := read(root)) and found[0]:
            return found[0], found[1] or "0"
    return None


def _from_pyproject(root: Path) -> tuple[str, str]:
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
    except (OSError, ValueError):
        return "", ""
    return str(project.get("name", "")), str(project.get("version", ""))


def _from_setup_cfg(root: Path) -> tuple[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        return "", ""
    version = parser.get("metadata", "version", fallback="")
    return parser.get("metadata", "name", fallback=""), "" if ":" in version else version


def _guessed(fallback: str) -> tuple[str, str]:
    """From a name like toolz-1.2.0."""
    name, dash, version = fallback.rpartition("-")
    return (name, version) if dash and version[:1].isdigit() else (fallback, "0")
