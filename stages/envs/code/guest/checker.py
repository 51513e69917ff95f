"""Plays a test with recorded results in the place of the function under test; runs in a sandbox without its code.

The test is executed as Python executes it, with its own helpers. A call of the function gives what the program under
test gave for the same arguments, leaves the arguments as that left them, and is reported where no result of it is
known yet: then its statement is not decided, and the test goes on with the next one.

The statements of a test are wrapped before they come here (testing.py: `wrapped`). What it imports, each grading pays.
"""

from __future__ import annotations

import builtins
import marshal
import os
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from composer_stages.sandbox.guest.values import decoded, encoded
else:
    from values import decoded, encoded

MOST_STATEMENTS = 100_000
"""Of a test with loops."""


class Unknown(BaseException):
    """A call whose result is not known yet; no `except Exception` of a test takes it."""


class Stop(BaseException):
    """The play ends with a problem. No SystemExit: a call may raise that in the head of a loop, as its own end."""


class Play:
    """One play of a test.

    results: encoded, of the calls in their order: (arguments, names of an exception's classes or None, result, index of
    the argument that the result is, or -1, arguments after the call or None).
    """

    def __init__(self, results: list[tuple[Any, ...]]) -> None:
        self.results, self.calls, self.problem = results, list[str](), ""
        self.outcomes: list[tuple[bool, str, list[int]]] = []
        self.called: list[int] = []
        self.unknown, self.statements = False, 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for the function under test."""
        try:
            marshal.dumps((args, kwargs))
        except ValueError:
            self.problem = self.problem or "argument"
            raise Unknown from None
        arguments, number = encoded((args, kwargs)), len(self.calls)
        self.calls.append(arguments)
        self.called.append(number)
        if self.unknown or number >= len(self.results) or self.results[number][0] != arguments:
            self.unknown = True  # what follows may be called with what this one leaves
            raise Unknown
        _, classes, result, index, after = self.results[number]
        if after is not None:
            for argument, changed in zip((*args, *kwargs.values()), decoded(after), strict=False):
                _become(argument, changed)
        if classes is not None:
            raise _exception(classes)
        return [*args, *kwargs.values()][index] if index >= 0 else decoded(result)

    def begin(self) -> None:
        """Begin a statement."""
        self.called = []
        self.statements += 1
        if self.statements > MOST_STATEMENTS:
            self.problem = "loops"
            raise Stop

    def end(self, text: str, is_assertion: bool, error: BaseException | None) -> None:
        """Record how a statement ended."""
        if self.problem:
            raise Stop
        if isinstance(error, Unknown) or (error is not None and self.unknown):
            return  # undecided: it may need what an earlier statement did not get
        if error is not None or is_assertion or self.called:
            self.outcomes.append((error is None, text, self.called))

    def run(self, test: Any) -> None:
        """Run a function of a test, or the tests of a class of unittest."""
        if not isinstance(test, type):
            test()
            return
        import unittest

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
        # Of what is outside of the statements that report themselves.
        errors = [text.strip().splitlines()[-1][:200] for _, text in (*result.errors, *result.failures)]
        self.outcomes += [(False, text, []) for text in errors if not self.unknown]


def _become(argument: Any, changed: Any) -> None:
    """Give a container the content that the program under test left in its own copy."""
    if type(argument) is not type(changed) or argument == changed:
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(changed)


def _exception(classes: list[str]) -> BaseException:
    name, base = classes[0], next(getattr(builtins, name) for name in classes if hasattr(builtins, name))
    exception = base if name == base.__name__ else type(name.rpartition(".")[2], (base,), {})
    # Not called: some have arguments that must be given. A group cannot be made without.
    return exception.__new__(exception, *(("", [Exception()]) if issubclass(base, BaseExceptionGroup) else ()))


def play(
    before: str, parts: list[tuple[CodeType, list[tuple[Any, ...]]]], function: str, variables: Any
) -> list[tuple[str, list[str] | None, list[tuple[bool, str, list[int]]]]]:
    """Play tests with the results of each; return of each the problem, the calls, and the outcomes.

    before: code in front of all of them. variables: further ones, an encoded dict. The problem is "argument", of a
    type that is not built in, "loops", without end, or empty; the calls are encoded, None where all were known. The
    outcomes: whether a statement held, its text, and the numbers of its calls.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    outcomes = []
    for part, results in parts:
        state = Play(results)
        names: dict[str, Any] = {"__name__": "test", "_play": state, **decoded(variables)}
        try:
            exec(before, names)  # noqa: S102 (inside the sandbox)
            names |= {function: state.call, "__name__": "__main__"}
            exec(part, names)  # noqa: S102
            check: Any = names.get("check")
            if getattr(getattr(check, "__code__", None), "co_filename", "") == part.co_filename:  # of the test itself
                check(state.call)
        except (Unknown, Stop):
            pass
        except BaseException as error:  # of the test itself, between its statements
            state.outcomes.append((False, f"{type(error).__name__}: {error}"[:200], []))
        outcomes.append((state.problem, state.calls if state.unknown else None, state.outcomes))
    return outcomes
