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
from configparser import ConfigParser, Error as ConfigError
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from composer_stages.envs import folders
from composer_stages.envs.folders import write
from composer_stages.envs.repo import trees
from composer_stages.envs.repo.guest.composer_rules import CACHES, COMPILED, HISTORY
from composer_stages.envs.repo.trees import ARCHIVE_ENDINGS, extract_archive
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.words import Sentence

PRIVATE = frozenset({"venv", ".venv", "env", ".env", "node_modules", ".idea", ".vscode", ".claude"})
BUILT_AT_TOP = frozenset({"build", "dist", "wheelhouse"})
LEFTOVERS = (*COMPILED, ".egg-info", ".dist-info", ".whl", ".egg", ".tar.gz", ".orig", ".rej", ".swp", ".coverage")
DISTRIBUTION_NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True)
class Package:
    """A clean copy below `root`, which is never written to.

    label: name and version in the characters of an identifier. sha256: the digest of all files.
    """

    name: str
    version: str
    root: Path
    label: str
    sha256: str


def unpack(source: Path, root: Path) -> Package:
    """Copy a folder, or unpack an archive, into the empty folder `root`; `BadInput` where it is neither or damaged.

    Name and version are those that the package declares; `importlib.metadata` finds them in a METADATA file in `root`.
    A folder that is itself an importable package goes one level deeper, to be importable.
    """

    def is_left_behind(path: str, is_folder: bool) -> bool:
        name = PurePosixPath(path).name
        if not is_folder:
            return name.endswith(LEFTOVERS) or name in HISTORY  # such as the file .git of a submodule
        # `build` and `dist` hold copies of the code only at the top; deeper they may be modules of the package.
        at_top = path == name and name in BUILT_AT_TOP
        # An agent can recover removed code from caches: Composer 2.5's report names a type checker's.
        return at_top or name in CACHES | HISTORY | PRIVATE or name.endswith((".egg-info", ".dist-info"))

    is_archive = source.name.endswith(ARCHIVE_ENDINGS) and source.is_file()
    if not source.is_dir() and not is_archive:
        raise BadInput("envs.feature_deletion.no-package-format", source=str(source), endings=list(ARCHIVE_ENDINGS))
    with trees.scratch() as raw:
        top = extract_archive(source, raw) if is_archive else source
        folders.copy(top, root / top.name if (top / "__init__.py").exists() else root, is_left_behind)
    endings = (ending for ending in ARCHIVE_ENDINGS if source.name.endswith(ending))
    declared_name = _declared_name(root, source.name.removesuffix(next(endings, "")))
    # In the characters that packaging allows, others as one dash: both become part of a path.
    name, version = (re.sub(r"[^A-Za-z0-9._+!-]+", "-", part).strip("-.") or "0" for part in declared_name)
    # The copy is imported from its tree, not installed, and packages that read their own version need METADATA.
    folder = f"{re.sub('[-_.]+', '_', name)}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(root, f"{folder}/METADATA", text.encode(), 0o644)
    label = re.sub(r"[^A-Za-z0-9.]+", "_", f"{name}-{version}")
    return Package(name, version, root, label, store.folder_sha256(root))


def _declared_name(root: Path, file_name: str) -> tuple[str, str]:
    """Return name and version by PKG-INFO, pyproject.toml, setup.cfg, or a file name like toolz-1.2.0."""
    pkg_info, pyproject, setup_cfg = _read_metadata(root)
    project = pyproject.get("project", {})
    if pkg_info["Name"] and pkg_info["Version"]:
        return pkg_info["Name"], pkg_info["Version"]
    if name := str(project.get("name", "")):
        return name, str(project.get("version", "")) or "0"
    if name := setup_cfg.get("metadata", "name", fallback=""):
        version = setup_cfg.get("metadata", "version", fallback="")
        # `attr: module.name` and `file: VERSION` are instructions to setuptools, which is not run.
        return name, "0" if ":" in version else version or "0"
    name, dash, version = file_name.rpartition("-")
    return (name, version) if dash and version[:1].isdigit() else (file_name, "0")


def _read_metadata(root: Path) -> tuple[Any, dict[str, Any], ConfigParser]:
    """Return the header fields of PKG-INFO, pyproject.toml and setup.cfg, each empty where missing or damaged."""
    text = (root / "PKG-INFO").read_text(errors="replace") if (root / "PKG-INFO").is_file() else ""
    pkg_info = email.parser.HeaderParser().parsestr(text)
    try:
        pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        pyproject = {}
    # setup.cfg is no template: with interpolation a plain `%` in it would raise.
    setup_cfg = ConfigParser(interpolation=None)
    try:
        setup_cfg.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        setup_cfg = ConfigParser(interpolation=None)  # Without what was read before the error.
    return pkg_info, pyproject, setup_cfg


def import_hint(modules: Iterable[str], root: Path) -> str:
    """Return how to add modules: by the distributions that hold them, or by those that the package declares."""
    resolved, unknown = resolve_modules(modules, root)
    names, declared = sorted(set(resolved.values())), sorted(declared_dependencies(root))
    return Sentence("envs.feature_deletion.add-requirements", names=names, unknown=unknown, declared=declared)


def resolve_modules(modules: Iterable[str], root: Path) -> tuple[dict[str, str], list[str]]:
    """Return module -> distribution where metadata names one, and the modules without."""
    installed = metadata.packages_distributions()
    # Names compare in the normal form of PEP 503.
    declared = {re.sub(r"[-_.]+", "-", name).lower(): name for name in declared_dependencies(root)}
    resolved: dict[str, str] = {}
    tops = sorted({module.partition(".")[0] for module in modules})
    for top in tops:
        distributions, normal = sorted(set(installed.get(top, ()))), re.sub(r"[-_.]+", "-", top).lower()
        if len(distributions) == 1:
            resolved[top] = distributions[0]
        elif normal in declared and not distributions:
            # Not any distribution of that name: one that the package does not declare may be a stranger's.
            resolved[top] = declared[normal]
    return resolved, [top for top in tops if top not in resolved]


def declared_dependencies(root: Path) -> set[str]:
    """Return the distributions that a package names as its dependencies, for running or for its tests."""
    pkg_info, document, setup_cfg = _read_metadata(root)
    lines = [str(value) for value in pkg_info.get_all("Requires-Dist", [])]
    project = document.get("project", {})
    groups: list[Any] = [project.get("dependencies", [])]
    groups += [*project.get("optional-dependencies", {}).values(), *document.get("dependency-groups", {}).values()]
    lines += [text for group in groups for text in group if isinstance(text, str)]
    values = [setup_cfg.get("options", key, fallback="") for key in ("install_requires", "tests_require")]
    if setup_cfg.has_section("options.extras_require"):
        values += [value for _, value in setup_cfg.items("options.extras_require")]
    lines += [line for value in values for line in value.splitlines() if line.strip()]
    return {match[1] for line in lines if (match := DISTRIBUTION_NAME.match(line))}
