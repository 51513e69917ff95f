"""How a command ends: a sentence on stderr and an exit code, never a traceback that was not asked for."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from composer_cli.visible import visible, visible_json
from stages.errors import ComposerError
from stages.redaction import redacted

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
