"""Data files that packages of this project bring along: prompts, tables and queries."""

import tomllib
from importlib import resources
from typing import Any


def load_text(package: str | None, name: str) -> str:
    """Return the text of a package's data file; `package` is the `__package__` of the caller."""
    return resources.files(package or "").joinpath(name).read_text("utf-8")


def load_toml(package: str | None, name: str) -> dict[str, Any]:
    """Return the tables of a package's TOML file."""
    return tomllib.loads(load_text(package, name))
