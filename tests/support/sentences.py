"""Every sentence of the program with names for its values: `./dev sentences` renews tests/sentences.txt."""

from pathlib import Path
from typing import Any

import jinja2

from composer_stages import errors, words

FILE = Path(__file__).parents[1] / "sentences.txt"
CLASSES = {
    "usage": errors.UsageError,
    "input": errors.BadInput,
    "incomplete": errors.Incomplete,
    "infrastructure": errors.InfrastructureError,
    "failed": errors.ComposerError,
    "breakdown": errors.Breakdown,
}


class Named(jinja2.ChainableUndefined):
    """A value that was not given: it is shown by its name in capitals, and holds one such value where it is walked."""

    def __str__(self) -> str:
        return str(self._undefined_name).upper()

    def __iter__(self) -> Any:
        return iter([self])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    __getitem__ = __getattr__
    __add__ = __radd__ = lambda self, other: f"{self}"


def rooms() -> list[str]:
    """Return all rooms that have sentences."""
    below = [str(path.parent.relative_to(words.STAGES)).replace("/", ".") for path in words.STAGES.rglob(words.FILE)]
    return sorted([*("" if room == "." else room for room in below), *words.ROOTS])


def render(template: str) -> str:
    """Return a template with the names of its values."""
    environment = words._environment().overlay(undefined=Named)
    shown = {
        name: lambda value, *_: str(value) for name in ("counted", "fixed", "grouped", "general", "repr", "format")
    }
    environment.filters = {**environment.filters, **shown, "format": lambda form, *values: " ".join(map(str, values))}
    remedy = words.COMMAND_LINE.remedy
    return environment.from_string(template).render(
        **words.COMMAND_LINE.words,
        option=lambda name, value="": remedy(words.CallOption(name, str(value))),
        setting=lambda key, value: remedy(words.Setting(key, value)),
        command=lambda *parts: remedy(words.Command(tuple(map(str, parts)))),
        stage_command=lambda stage: f"composer {stage}",
        from_run=lambda name="RUN": remedy(words.FromRun(name)),
        did_you_mean=lambda *_: "",
    )


def table() -> str:
    """Return a line for each sentence: exit code, code, sentence."""
    lines = list[str]()
    for room in rooms():
        for name, (group, template) in sorted(words.entries(room).items()):
            code = CLASSES[group].exit_code if group in CLASSES else "-"
            try:
                text = render(template)
            except Exception:  # a template that computes with its values is shown as it is
                text = template
            lines.append(f"{code} {f'{room}.{name}'.lstrip('.')}: {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(table(), "utf-8")
