"""Filters and small words of the templates."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from composer_cli.console import duration
from composer_cli.show.status import age_of


def plain(value: Any) -> str:
    """A value for people: yes and no, four digits, a dash for what is not known."""
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return str(value)


def words(name: str) -> str:
    """The name of a column as words."""
    return name.replace("_", " ")


def query(wanted: Mapping[str, Any], **changed: Any) -> str:
    """An address's question, with some of it changed and what is empty left out."""
    kept = {name: value for name, value in {**wanted, **changed}.items() if value not in ("", None, False, 0)}
    return "?" + urlencode({name: "on" if value is True else value for name, value in kept.items()}) if kept else "?"


def counted(number: int) -> str:
    """100,000."""
    return f"{number:,}"


FILTERS: dict[str, Callable[..., str]] = {
    "plain": plain,
    "words": words,
    "duration": duration,
    "age": age_of,
    "counted": counted,
    "part": lambda text: quote(text, safe=""),
}
