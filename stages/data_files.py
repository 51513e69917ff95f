"""Data files that packages of this project bring along: prompts, tables, queries and templates."""

import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def load_text(package: str | None, name: str) -> str:
    """Return the text of a package's data file; `package` is the `__package__` of the caller."""
    return resources.files(package or "").joinpath(name).read_text("utf-8")


def load_toml(package: str | None, name: str) -> dict[str, Any]:
    """Return the tables of a package's TOML file."""
    return tomllib.loads(load_text(package, name))


def load_template(package: str | None, name: str, autoescape: bool = False) -> "jinja2.Template":
    """Return the template of a package's data file."""
    return template_environment(autoescape=autoescape, keep_trailing_newline=True).from_string(load_text(package, name))


def template_environment(**options: Any) -> "jinja2.Environment":
    """Return an environment of templates without the lines of their blocks, which refuse what is not given."""
    import jinja2  # slow to import, and few data files are templates

    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)  # noqa: S701
