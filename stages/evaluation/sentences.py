"""Fill the templates of sentences that stand beside records: numbers and enumerations in, sentences out.

In a template a paragraph is one sentence, or several that belong together; line breaks in it are spaces. What is put in
by `{{ }}` stays as it is, its blanks and line breaks included.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from markupsafe import Markup

from composer_stages import layout
from composer_stages.data_files import load_text, template_environment
from composer_stages.runs import display
from composer_stages.words import FILTERS

BLANKS = {" ": "\ue000", "\n": "\ue001", "\t": "\ue002"}
"""Blanks of values, and the private characters that stand for them until a template is split into sentences."""
TO_PRIVATE, FROM_PRIVATE = str.maketrans(BLANKS), str.maketrans({private: blank for blank, private in BLANKS.items()})


FORMATS: dict[str, Callable[..., Any]] = {
    **FILTERS,
    "bar": lambda share: f"{100 * share:g} points",
    "minus": display.points,
    "one_line": lambda text: Markup(_on_one_line(text)),  # noqa: S704 (no HTML)
    "p": layout.p_value,
    "percent": display.percent,
    "plural": layout.plural,
    "share": lambda share, digits: f"{share:.{digits}%}",
    "significant": lambda value: f"{value:.2g}",
    "size": lambda share: f"{100 * share:.1f}",
    "whole": lambda value: f"{value:.0f}",
}
"""Formats that every template of this package and of `comparison` may use."""


class Sentences:
    """The sentences of one subject: macros of a template in a package, by their names."""

    def __init__(self, package: str, template: str, **names: Any) -> None:
        self._package, self._template, self._names = package, template, names

    @cache  # noqa: B019 (a handful of instances, which live as long as the process)
    def _macros(self) -> Any:
        environment = template_environment(autoescape=True, finalize=_keep_blanks)
        callables = {name: value for name, value in self._names.items() if callable(value)}
        environment.filters.update(FORMATS | callables)
        environment.globals.update({name: value for name, value in self._names.items() if name not in callables})
        return environment.from_string(load_text(self._package, self._template)).module

    def paragraphs(self, name: str, *values: Any) -> list[str]:
        """Return the paragraphs of a macro with these values, each on one line."""
        text = str(getattr(self._macros(), name)(*values))
        lines = map(_on_one_line, re.split(r"\n[ \t]*\n", text))
        return [line.translate(FROM_PRIVATE) for line in lines if line]

    def text(self, name: str, *values: Any) -> str:
        """Return the paragraphs of a macro with these values, one after the other."""
        return " ".join(self.paragraphs(name, *values))


def _on_one_line(text: str) -> str:
    return re.sub(r"[ \n\t]+", " ", text).strip(" ")


def _keep_blanks(value: Any) -> Markup:
    """Return a value as text whose blanks outlast the splitting into sentences; texts of macros are as they are."""
    return value if isinstance(value, Markup) else Markup(str(value).translate(TO_PRIVATE))  # noqa: S704 (no HTML)
