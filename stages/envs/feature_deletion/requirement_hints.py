"""Which distributions bring modules that tests could not import: what packaging metadata says, and no guess.

A distribution may be called otherwise than its module (`attrs` holds `attr`), and one that has the module's name may be
a stranger's. Known are the distributions that are installed here, and those that the package itself declares.
"""

import email.parser
import re
import tomllib
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from configparser import Error as ConfigError
from importlib import metadata
from pathlib import Path
from typing import Any

WAY_OUT = "--set env.requirements='[{0}]' (for `composer tasks`: --set requirements='[{0}]')"
NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")


def hint(modules: Iterable[str], root: Path) -> str:
    """How to bring modules in: by the distributions that hold them, or by those that the package declares."""
    known, unknown = resolved(modules, root)
    said = []
    if known:
        names = ", ".join(f'"{name}"' for name in sorted(set(known.values())))
        said.append(f"Add {WAY_OUT.format(names)}.")
    if unknown:
        listed = ", ".join(sorted(declared(root))) or "nothing"
        said.append(
            f"No metadata says which distribution holds {', '.join(unknown)}; the package declares {listed}. Look the "
            f"distribution up, and add it with {WAY_OUT.format('NAME')}."
        )
    return " ".join(said)


def resolved(modules: Iterable[str], root: Path) -> tuple[dict[str, str], list[str]]:
    """Module -> distribution where metadata says it, and the modules of which it says nothing."""
    installed = metadata.packages_distributions()
    own = {_normal(name): name for name in declared(root)}
    known: dict[str, str] = {}
    tops = sorted({module.partition(".")[0] for module in modules})
    for top in tops:
        holding = sorted(set(installed.get(top, ())))
        if len(holding) == 1:
            known[top] = holding[0]
        elif _normal(top) in own and not holding:
            known[top] = own[_normal(top)]
    return known, [top for top in tops if top not in known]


def declared(root: Path) -> set[str]:
    """The distributions that a package names as its dependencies, for running or for its tests."""
    named = [*_from_pkg_info(root), *_from_pyproject(root), *_from_setup_cfg(root)]
    return {match[1] for text in named if (match := NAME.match(text))}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _from_pkg_info(root: Path) -> list[str]:
    if not (root / "PKG-INFO").is_file():
        return []
    fields = email.parser.HeaderParser().parsestr((root / "PKG-INFO").read_text(errors="replace"))
    return [str(value) for value in fields.get_all("Requires-Dist", [])]


def _from_pyproject(root: Path) -> Iterator[str]:
    try:
        whole = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return
    project = whole.get("project", {})
    groups: list[Any] = [project.get("dependencies", [])]
    groups += [*project.get("optional-dependencies", {}).values(), *whole.get("dependency-groups", {}).values()]
    yield from (text for group in groups for text in group if isinstance(text, str))


def _from_setup_cfg(root: Path) -> list[str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(root / "setup.cfg")
    except (OSError, ConfigError, UnicodeDecodeError):
        return []
    texts = [parser.get("options", key, fallback="") for key in ("install_requires", "tests_require")]
    if parser.has_section("options.extras_require"):
        texts += [value for _, value in parser.items("options.extras_require")]
    return [line for text in texts for line in text.splitlines() if line.strip()]
