"""Results on stdout: as text, as JSON, and texts that take each other's place."""

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TextIO

import orjson
import typer

from stages.errors import ComposerError
from stages.redaction import redacted

# ---- visible
# Characters that steer a terminal or hide in a text are spelled: what models and servers write is not obeyed.

STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # direction of writing, separators of lines
    "\ud800-\udfff]"  # halves of characters, which no output can encode
)


def visible(text: str) -> str:
    r"""The text with `\x1b` for an escape character, and so on; newlines and tabs stay."""
    return STEERING.sub(lambda found: _spelled(ord(found[0])), text)


def visible_line(text: str) -> str:
    r"""The same on one line: newlines become `\n`."""
    return visible(text).replace("\n", "\\n")


def visible_json(text: str) -> str:
    """The same for a JSON document, which means what it meant before."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spelled(code: int) -> str:
    return {13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


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


# ---- errors
# How a command ends: a sentence on stderr and an exit code, never a traceback that was not asked for.

FAILED, USAGE = 1, 2


def as_sentences(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose failures become a sentence and an exit code; with `verbose` the traceback comes first."""

    @wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except (typer.Exit, typer.TyperException):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output went away
            raise typer.Exit(FAILED) from None
        except BaseException as error:
            if options.get("verbose"):
                say(traceback.format_exc().rstrip())
            if options.get("json"):
                tell_json(sentence(error), exit_code(error))
            say(sentence(error))
            raise typer.Exit(exit_code(error)) from None

    return guarded


def exit_code(error: BaseException) -> int:
    """1 failed, 2 usage or refusal, 3 incomplete but saved, 4 bad input, 130 Ctrl-C, 143 SIGTERM."""
    if _interrupts(error):
        return 128 + int(getattr(error, "signal_number", signal.SIGINT))
    if isinstance(error, OSError) and error.filename is not None:
        return USAGE
    return error.exit_code if isinstance(error, ComposerError) else FAILED


def sentence(error: BaseException) -> str:
    """What happened and what to do, in one line; notes on the exception say where its log lies."""
    if _interrupts(error):
        if getattr(error, "signal_number", signal.SIGINT) == signal.SIGTERM:
            return "Stopped by SIGTERM. Everything finished is saved; the same command with --resume goes on."
        return "Interrupted. Everything finished is saved; the same command with --resume goes on."
    if isinstance(error, ComposerError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written ({error.strerror}). Check the path and its permissions."
    notes = " ".join(getattr(error, "__notes__", ()))
    first = (str(error).splitlines() or [""])[0]
    return f"Composer failed unexpectedly: {type(error).__name__}: {first}. {notes or 'Run it again with -v.'}".strip()


def _interrupts(error: BaseException) -> bool:
    from stages.runs.artifact import Interrupted

    return isinstance(error, (KeyboardInterrupt, Interrupted))


def tell_json(text: str, code: int) -> None:
    """A failure on stdout, for whoever asked for JSON."""
    print(visible_json(json.dumps({"error": redacted(text), "exit_code": code})))


def say(text: str) -> None:
    """One line for a person."""
    print(visible(redacted(text)), file=sys.stderr, flush=True)
