"""Results on stdout: as text, as JSON, and texts that take each other's place."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import orjson

from composer_cli.visible import visible, visible_json


@contextmanager
def views() -> Iterator[Callable[[str], None]]:
    """Shows texts one after the other: on a terminal each in the place of the one before, else each that is new."""
    if not sys.stdout.isatty():
        latest: list[str] = []

        def tell(text: str) -> None:
            if latest[-1:] != [text]:
                print_text(text)
            latest[:] = [text]

        yield tell
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(visible(text)), refresh=True)


def print_json(value: Any) -> None:
    """One object on stdout; dataclasses in it become objects, and what JSON has no word for becomes text."""
    print(visible_json(orjson.dumps(value, default=str).decode()))


def print_text(text: str, colours: Mapping[str, int] | None = None) -> None:
    """A result for people on stdout; nothing in it steers their terminal.

    colours: words that get a colour of their own, by its number in a terminal, where colours are wanted.
    """
    shown = visible(text)
    if colours and wants_colour(sys.stdout):
        shown = re.sub(rf"\b({'|'.join(colours)})\b", lambda m: f"\x1b[{colours[m[0]]}m{m[0]}\x1b[0m", shown)
    print(shown)


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR forbids it, FORCE_COLOR asks for it, each where it is not empty; else a terminal wants it."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
