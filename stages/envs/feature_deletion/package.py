"""A package to make tasks from: a folder or an sdist, copied without its history and caches, never built or run.

Its metadata gives its name, version and dependencies. `import_hint` names the distributions of modules that its tests
cannot import, by packaging metadata and without guessing: a distribution may have another name than its module (`attrs`
holds `attr`), and one with the module's name may be a stranger's. Known are the distributions that are installed here,
and those that the package itself declares.
"""

import email.parser
import re
import tomllib
from collections.abc import Iterable
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

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
WAY_OUT = "--set env.requirements='[{0}]' (for `composer tasks`: --set requirements='[{0}]')"
DISTRIBUTION_NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True)
class Package:
    """A clean copy below `root`, which is never written to."""

    name: str
    version: str
    root: Path

    @property
    def label(self) -> str:
        """Name and version in the characters of an identifier."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", f"{self.name}-{self.version}")

    @cached_property
    def sha256(self) -> str:
        """The digest of all files."""
        return store.folder_sha256(self.root)


def unpack(source: Path, root: Path) -> Package:
    """Copy a folder, or unpack an archive, into the empty folder `root`; `BadInput` where it is neither or damaged.

    Name and version are those that the package declares; `importlib.metadata` finds them in a METADATA file in `root`.
    """
    if source.is_dir():
        _copy(source, root)
    elif source.name.endswith(ARCHIVE_ENDINGS) and source.is_file():
        with trees.scratch() as raw:
            _copy(extract_archive(source, raw), root)
    else:
        raise BadInput(
            f"The package {str(source)!r} is neither a folder nor an archive ({', '.join(ARCHIVE_ENDINGS)}). "
            "Give one of them."
        )
    endings = (ending for ending in ARCHIVE_ENDINGS if source.name.endswith(ending))
    declared_name = _declared_name(root, source.name.removesuffix(next(endings, "")))
    # In the characters that packaging allows, others as one dash: both become part of a path.
    name, version = (re.sub(r"[^A-Za-z0-9._+!-]+", "-", part).strip("-.") or "0" for part in declared_name)
    folder = f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(root, f"{folder}/METADATA", text.encode(), 0o644)
    return Package(name, version, root)


def _copy(top: Path, root: Path) -> None:
    """Copy into `root`; a folder that is itself an importable package goes one level deeper, to be importable."""

    def is_left_behind(path: str, is_folder: bool) -> bool:
        name = PurePosixPath(path).name
        if not is_folder:
            return name.endswith(LEFTOVERS)
        at_top = path == name and name in BUILT_AT_TOP
        return at_top or name in trees.CACHES | trees.HISTORY | PRIVATE or name.endswith((".egg-info", ".dist-info"))

    folders.copy(top, root / top.name if (top / "__init__.py").exists() else root, is_left_behind)


def _declared_name(root: Path, file_name: str) -> tuple[str, str]:
    """Return name and version by PKG-INFO, pyproject.toml, setup.cfg, or a file name like toolz-1.2.0."""
    fields, project, setup_cfg = _pkg_info(root), _pyproject(root).get("project", {}), _setup_cfg(root)
    if fields["Name"] and fields["Version"]:
        return fields["Name"], fields["Version"]
    if name := str(project.get("name", "")):
        return name, str(project.get("version", "")) or "0"
    if name := setup_cfg.get("metadata", "name", fallback=""):
        version = setup_cfg.get("metadata", "version", fallback="")
        return name, "0" if ":" in version else version or "0"
    name, dash, version = file_name.rpartition("-")
    return (name, version) if dash and version[:1].isdigit() else (file_name, "0")


def _pkg_info(root: Path) -> Any:
    """Return the header fields of PKG-INFO; none where it is missing."""
    text = (root / "PKG-INFO").read_text(errors="replace") if (root / "PKG-INFO").is_file() else ""
    return email.parser.HeaderParser().parsestr(text)


def _pyproject(root: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return {}


def _setup_cfg(root: Path) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        return ConfigParser(interpolation=None)
    return parser


def import_hint(modules: Iterable[str], root: Path) -> str:
    """Return how to add modules: by the distributions that hold them, or by those that the package declares."""
    known, unknown = resolve_modules(modules, root)
    sentences = []
    if known:
        names = ", ".join(f'"{name}"' for name in sorted(set(known.values())))
        sentences.append(f"Add {WAY_OUT.format(names)}.")
    if unknown:
        listed = ", ".join(sorted(declared_dependencies(root))) or "nothing"
        sentences.append(
            f"No metadata says which distribution holds {', '.join(unknown)}; the package declares {listed}. Look the "
            f"distribution up, and add it with {WAY_OUT.format('NAME')}."
        )
    return " ".join(sentences)


def resolve_modules(modules: Iterable[str], root: Path) -> tuple[dict[str, str], list[str]]:
    """Return module -> distribution where metadata names one, and the modules without."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    installed = metadata.packages_distributions()
    own = {normal(name): name for name in declared_dependencies(root)}
    known: dict[str, str] = {}
    tops = sorted({module.partition(".")[0] for module in modules})
    for top in tops:
        holding = sorted(set(installed.get(top, ())))
        if len(holding) == 1:
            known[top] = holding[0]
        elif normal(top) in own and not holding:
            known[top] = own[normal(top)]
    return known, [top for top in tops if top not in known]


def declared_dependencies(root: Path) -> set[str]:
    """Return the distributions that a package names as its dependencies, for running or for its tests."""
    lines = [str(value) for value in _pkg_info(root).get_all("Requires-Dist", [])]
    document, setup_cfg = _pyproject(root), _setup_cfg(root)
    project = document.get("project", {})
    groups: list[Any] = [project.get("dependencies", [])]
    groups += [*project.get("optional-dependencies", {}).values(), *document.get("dependency-groups", {}).values()]
    lines += [text for group in groups for text in group if isinstance(text, str)]
    values = [setup_cfg.get("options", key, fallback="") for key in ("install_requires", "tests_require")]
    if setup_cfg.has_section("options.extras_require"):
        values += [value for _, value in setup_cfg.items("options.extras_require")]
    lines += [line for value in values for line in value.splitlines() if line.strip()]
    return {match[1] for line in lines if (match := DISTRIBUTION_NAME.match(line))}
