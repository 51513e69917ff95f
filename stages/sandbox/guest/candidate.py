"""Runs a candidate's function and writes what it returned: JSON lines that keep the type of every value.

This runs in the candidate's own process, so it can only be made to lie about the candidate's own answers. Expected
values never come here: they are compared on the host.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from composer_stages.sandbox.guest.protocol import write_all
    from composer_stages.sandbox.guest.values import class_names, encoded
else:
    from protocol import write_all
    from values import class_names, encoded

OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
compile("", "", "exec")  # the first one of a process takes 1.6 ms: here, before any fork


def answer_all(source: bytes, file: str, function: str, arguments: list[tuple], out: int) -> NoReturn:
    """Write one line for each tuple of arguments: ["v", value] or ["e", name of the exception]."""
    try:
        target = load(source, file, function)
    except BaseException as error:
        write_all(out, failure(error) * len(arguments))
        os._exit(0)
    for values in arguments:
        try:
            line = b'["v",' + encoded(target(*values)).encode() + b"]\n"
        except BaseException as error:  # SystemExit too: it ends one call, not the answers to the others
            line = failure(error)
        write_all(out, line)
    os._exit(0)  # not sys.exit: no handler that the candidate registered may run and write more lines


def load(source: bytes, file: str, function: str) -> Any:
    """Return a function of a fresh module, executed from a source as if it were a file of the work folder."""
    code = compile(source, file, "exec")
    # A candidate may be called protocol.py, or import one: our own modules of such names must not be found instead.
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(OWN_FOLDER):
            del sys.modules[name]
    fresh = type(os)(os.path.basename(file).removesuffix(".py"))
    fresh.__file__ = os.path.abspath(file)
    sys.modules[fresh.__name__] = fresh
    sys.path[0] = os.path.dirname(fresh.__file__)
    exec(code, fresh.__dict__)  # noqa: S102 (the candidate's own process, inside the sandbox)
    return getattr(fresh, function)


def failure(error: BaseException) -> bytes:
    """Return the line for a call that raised."""
    names = encoded(type(error).__name__) + "," + encoded(class_names(type(error)))
    return b'["e",' + names.encode() + b"]\n"
