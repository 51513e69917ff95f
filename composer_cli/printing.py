"""Output of commands: results on stdout as text or JSON, messages on stderr, and exit codes.

Escapes control characters in everything that is printed, since models and servers wrote some of it.
"""

import errno
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TextIO

import orjson
import typer

from composer_stages.errors import Breakdown, ComposerError, UsageError
from composer_stages.layout import STEERING, WORD, escape_control_characters, folded, width
from composer_stages.redaction import redacted
from composer_stages.words import Sentence

FAILED, USAGE = Breakdown.exit_code, UsageError.exit_code
"""Exit codes that no exception carries itself."""
TRAIN = (
    *("torch", "transformers", "tokenizers", "datasets", "huggingface_hub", "trl", "accelerate", "peft"),
    *("safetensors", "gguf", "jaxtyping", "scipy"),
)
EXTRAS = dict.fromkeys(TRAIN, "train") | {"matplotlib": "charts"}
"""The extra that brings a package."""
REPORT = 100
"""Columns to which reports wrap their sentences."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a stream that cannot be written."""


def escape_json(text: str) -> str:
    """Return a JSON document with JSON's own escapes for control characters: its value stays the same."""
    return STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: Any) -> None:
    """Print one object on stdout; dataclasses in it become objects, and types that JSON lacks become text."""
    print(escape_json(orjson.dumps(value, default=str).decode()))


def print_text(text: str, colours: Mapping[str, int] | None = None, *, bold_titles: bool = False) -> None:
    """Print a result for people on stdout.

    colours: words that get a colour, by its number in a terminal. bold_titles: whether lines that are not indented are
    bold. NO_COLOR forbids both and FORCE_COLOR asks for them, each where it is not empty; otherwise a terminal gets
    them.
    """
    printed = escape_control_characters(text)
    if not os.environ.get("NO_COLOR") and (os.environ.get("FORCE_COLOR") or sys.stdout.isatty()):
        if colours:
            printed = re.sub(rf"\b({'|'.join(colours)})\b", lambda m: f"\x1b[{colours[m[0]]}m{m[0]}\x1b[0m", printed)
        if bold_titles:
            printed = re.sub(r"^\S.*$", lambda m: f"\x1b[1m{m[0]}\x1b[0m", printed, flags=re.M)
    print(printed)


def fit_to_terminal(text: str) -> str:
    """Return a report, whose sentences are wrapped, without lines wider than the terminal, if stdout is one."""
    lines, before = list[str](), ""
    for line in text.split("\n"):
        # A sentence goes on below where its next word had no room; a row of a table has two spaces between its columns.
        further, first = len(line) - len(line.lstrip()), WORD.match(line)
        alike = further == len(before) - len(before.lstrip()) and "  " not in f"{before.strip()}\n{line.strip()}"
        goes_on = first and before and alike and REPORT - width(first[2]) <= width(before) <= REPORT
        lines[-1:] = [f"{lines[-1]} {line.strip()}"] if goes_on else [*lines[-1:], line]
        before = line
    return folded("\n".join(lines), shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def print_result(as_json: bool, document: Any, text: str, colours: Mapping[str, int] | None = None) -> None:
    """Print a command's result on stdout: the document as JSON, or the text for people."""
    print_json(document) if as_json else print_text(text, colours)


@contextmanager
def views() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one text after another.

    On a terminal each text replaces the one before; elsewhere each text that differs from the one before is printed.
    """
    if not sys.stdout.isatty():
        latest: list[str] = []

        def show(text: str) -> None:
            if latest[-1:] != [text]:
                print_text(text)
            latest[:] = [text]

        yield show
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(escape_control_characters(text)), refresh=True)


def say(text: str) -> None:
    """Print one line for people on stderr; where nothing can be written there, the exit code has to do."""
    try:
        print(escape_control_characters(redacted(text)), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # a full disk, a terminal that was closed
        discard(sys.stderr)


def print_error_json(text: str, code: int) -> None:
    """Print a failure on stdout, for commands with --json."""
    with suppress(OSError, ValueError):
        print(escape_json(json.dumps({"error": redacted(text), "exit_code": code})))


def open_missing_streams() -> None:
    """Open /dev/null in the place of standard streams that are closed; `UsageError` where stdout is.

    A file that is opened later would otherwise get the number of the closed stream, and what is printed into it.
    """
    closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    if closed:
        raise UsageError("cli.stdout-closed")


def discard(stream: TextIO) -> None:
    """Let a stream lead nowhere, after it failed: Python would fail at exit with what is still in its buffer."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def reporting_errors(*, json: bool = False, verbose: bool = False, resumes: bool = False) -> Iterator[None]:
    """Turn a command's failures into a sentence on stderr and an exit code; with `verbose` after the traceback.

    json: whether the sentence is printed on stdout too, as JSON. resumes: whether the command is that of a run, which
    goes on with --resume.
    """
    try:
        try:
            yield
        except typer.Exit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a full disk shows here, not at the interpreter's exit
    except (typer.Exit, typer.TyperException):
        raise
    except BrokenPipeError:  # the reader of our output went away
        discard(sys.stdout)
        raise typer.Exit(FAILED) from None
    except BaseException as error:
        if verbose:
            say(traceback.format_exc().rstrip())
        sentence, code = sentence_and_code(error, resumes=resumes)
        if json:
            print_error_json(sentence, code)
        if is_output_failure(error):
            discard(sys.stdout)
        say(sentence)
        raise typer.Exit(code) from None


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Report the errors of a command that is not a run, as its options `json` and `verbose` ask."""

    @wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        with reporting_errors(json=bool(options.get("json")), verbose=bool(options.get("verbose"))):
            command(*arguments, **options)

    return guarded


def is_output_failure(error: BaseException) -> bool:
    """Whether stdout could not be written: such an error names no file, and those of run folders are sentences."""
    return isinstance(error, OSError) and error.filename is None and error.errno in (*FULL, errno.EBADF)


@contextmanager
def interrupt_leaves(sentence: str) -> Iterator[None]:
    """Tell by this sentence what an interrupt leaves, in a command that is not a run but leaves something."""
    from composer_stages.stopping import Interrupted

    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        raise Interrupted(getattr(error, "signal_number", signal.SIGINT), sentence) from None


def sentence_and_code(error: BaseException, *, resumes: bool = False) -> tuple[str, int]:
    """Return what happened and what to do, in one line, and the exit code.

    resumes: whether the command is that of a run, which goes on with --resume.

    The codes: 1 failed, 2 usage or refusal, 3 incomplete but saved, or a server that does not answer, 4 bad input, 5 an
    error that nobody foresaw, or a machine without space or memory; 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
    """
    from composer_stages.stopping import Interrupted

    if isinstance(error, (KeyboardInterrupt, Interrupted)):
        number = int(getattr(error, "signal_number", signal.SIGINT))
        # 128 + the signal's number, as a shell reports a process that the signal ended.
        name = None if number == signal.SIGINT else signal.Signals(number).name
        saved = Sentence("cli.saved-resume") if resumes else Sentence("cli.nothing-kept")
        remains = getattr(error, "notice", "") or saved
        return Sentence("cli.stopped", signal=name, remains=remains), 128 + number
    if isinstance(error, ComposerError):
        return str(error), error.exit_code
    if is_output_failure(error):
        return (Sentence("cli.output-not-writable", error=error), FAILED)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        where = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
        return Sentence("cli.too-many-files", where=where), USAGE
    if isinstance(error, OSError) and error.filename is not None:
        return (Sentence("cli.file-not-usable", path=error.filename, reason=error.strerror), USAGE)
    if isinstance(error, MemoryError):
        return (Sentence("cli.no-memory-left", resumes=resumes), FAILED)
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return Sentence("cli.package-missing", package=error.name, extra=extra), USAGE
    # An unexpected exception of a stage has a note that names its log.
    notes = " ".join(getattr(error, "__notes__", ())) or "Run it again with -v."
    first = (str(error).splitlines() or [""])[0]
    return f"Composer failed unexpectedly: {type(error).__name__}: {first}. {notes}".strip(), FAILED
