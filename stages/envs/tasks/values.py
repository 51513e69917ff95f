"""Tests of a row that are decided by values: calls of functions, and scripts with what they print and write.

The code under test runs in sandboxes that hold its tree and what it is called with. What it returns, raises, prints or
writes leaves the sandbox and is compared here with what is expected, which is not sent into it. It is there all the
same where another call of the same function is given it, or a hidden file holds it.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from composer_stages.envs import folders
from composer_stages.envs.repo import grading, runner, trees
from composer_stages.envs.repo.grading import TestOutcomes
from composer_stages.envs.repo.task import RunTask
from composer_stages.json_text import restored
from composer_stages.layout import shortened
from composer_stages.sandbox import Answer, Call, judge
from composer_stages.sandbox.equality import equal, equal_texts, formatted, is_raised
from composer_stages.swebench.lists import Statuses
from composer_stages.words import Sentence

CALLER = """\
import sys
from importlib import import_module

sys.path.insert(1, "src")
target = import_module({module!r})
for part in {name!r}.split("."):
    target = getattr(target, part)


def call(args, kwargs):
    return target(*args, **kwargs)
"""
"""Of one function; it is imported from the tree as any program would, so that it may be in a package."""
EXACT = ("args", "kwargs", "returns")
"""Fields of a call that hold JSON of any kind; a row has them as `json_text.exact` returns them."""
LONGEST = 200
"""Characters of a value in the log."""
_short = partial(shortened, most=LONGEST)


def test_names(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a row's tests that are decided by values, in order."""
    calls = (f"call {number}: {format_call(call)}" for number, call in enumerate(calls_of(row), 1))
    scripts = (f"script {number}: {script['command']}" for number, script in enumerate(row["script"], 1))
    return (*calls, *scripts)


def calls_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a row with the numbers that its author wrote."""
    return [call | {name: restored(call[name]) for name in EXACT} for call in row["calls"]]


def format_call(call: Mapping[str, Any]) -> str:
    """Format a call as Python code."""
    arguments = [*map(formatted, call["args"]), *(f"{key}={formatted(value)}" for key, value in call["kwargs"].items())]
    return f"{call['function']}({_short(', '.join(arguments))})"


def gives_away_results(row: Mapping[str, Any]) -> bool:
    """Return whether an expected result is an argument of another call or script, where code could look it up."""
    calls = calls_of(row)
    inputs = [(call["function"], [*call["args"], *call["kwargs"].values()]) for call in calls]
    inputs += [(script["command"], [script["command"], script["stdin"]]) for script in row["script"]]
    expected = [(call["function"], call["returns"]) for call in calls]
    expected += [
        (script["command"], text) for script in row["script"] for text in (script["stdout"], *script["files"].values())
    ]
    return any(
        str(value).strip() not in EASY and name != input_name and any(_contains(argument, value) for argument in values)
        for name, value in expected
        for input_name, values in inputs
    )


EASY = frozenset(map(str, (None, True, False, 0, 1, -1, "")))
"""Texts of values that need no look: code that guesses them needs none either."""


def _contains(value: Any, expected: Any) -> bool:
    """Return whether a value contains the expected one, as a part or as a word of its text: 31 does not contain 3."""
    if equal(value, expected, json=True):
        return True
    if isinstance(value, dict | list | tuple | set):
        return any(
            _contains(part, expected) for part in ([*value, *value.values()] if isinstance(value, dict) else value)
        )
    text = formatted(expected) if isinstance(expected, int) else str(expected).strip()
    if not isinstance(expected, int | float) and not re.fullmatch(r"-?[\d.]+", text):
        return isinstance(value, str) and isinstance(expected, str) and text in value
    # Zeros behind the point tell nothing: 7.50 is 7.5.
    number = re.escape(text) + (r"0*" if "." in text else "")
    return re.search(rf"(?<![\d.]){number}(?!\d|\.\d)", re.sub(r"python[\d.]+", "", str(value))) is not None


def compare_values(kind: str, row: Mapping[str, Any]) -> RunTask:
    """Return a runner of the calls and scripts of a row, in sandboxes of this kind."""

    def run(folder: Path) -> TestOutcomes:
        failures = [*_calls(kind, row, folder), *(_script(kind, row, script, folder) for script in row["script"])]
        statuses: Statuses = {}
        lines = []
        for name, failure in zip(test_names(row), failures, strict=True):
            statuses[name] = "failed" if failure else "passed"
            lines.append(f"FAIL {name}: {failure}" if failure else f"ok   {name}")
        return TestOutcomes(statuses, tampered=False, log="".join(f"{line}\n" for line in lines))

    return run


def _calls(kind: str, row: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Run the calls; yield for each the difference from the expected result, "" for none."""
    groups = [(function, [*calls]) for function, calls in groupby(calls_of(row), lambda call: call["function"])]
    if not groups:
        return
    requests = []
    for function, calls in groups:
        module, _, name = function.partition(":")
        arguments = [(tuple(call["args"]), call["kwargs"]) for call in calls]
        requests.append(Call(CALLER.format(module=module, name=name).encode(), "call", arguments, "composer_caller.py"))
    answered = judge(kind, requests, replace(grading.LIMITS, wall_s=row["timeout_s"]), folder=folder)
    for (_, calls), answers in zip(groups, answered, strict=True):
        yield from map(_wrong_answer, calls, answers)


def _wrong_answer(call: Mapping[str, Any], answer: Answer) -> str:
    if call["raises"]:
        right, expected = is_raised(answer.classes, call["raises"]), call["raises"]
    else:
        right = answer.error is None and equal(answer.value, call["returns"], json=True)
        expected = _short(formatted(call["returns"]))
    result = f"ended with {answer.error}" if answer.error else f"returned {_short(formatted(answer.value))}"
    return "" if right else f"{result}, expected {expected}"


def _script(kind: str, row: Mapping[str, Any], script: Mapping[str, Any], folder: Path) -> str:
    """Run a script; return the first difference of its output or files from the expected ones, "" for none."""
    limits = replace(grading.LIMITS, wall_s=row["timeout_s"])
    with trees.scratch() as tree, _stdin(script["stdin"]) as stdin:
        folders.copy(folder, tree)
        # A file from before the script is not one that it wrote.
        trees.apply(dict.fromkeys(script["files"]), tree)
        with runner.open_package_sandbox(kind, tree, limits, None, readonly=[stdin.parent]) as sandbox:
            result = sandbox.run(f"bash -c {shlex.quote(script['command'])} <{shlex.quote(str(stdin))} 2>/dev/null")
        if result.timed_out:
            return Sentence("envs.tasks.script-timed-out", limit_s=row["timeout_s"])
        if script["exit_code"] not in ("any", result.returncode):
            return Sentence("envs.tasks.other-exit-code", code=result.returncode, expected=script["exit_code"])
        is_same = partial(equal_texts, numbers=script["numbers"] == "close")
        if script["stdout"] is not None and not is_same(result.output, script["stdout"]):
            return f"it printed {_short(repr(result.output))}, not {_short(repr(script['stdout']))}"
        for path, text in script["files"].items():
            file = trees.read(tree, path)
            content = None if file is None else file.data.decode(errors="replace")
            if content is None or not is_same(content, text):
                written = "no such file" if content is None else _short(repr(content))
                return f"{path} holds {written}, not {_short(repr(text))}"
    return ""


@contextmanager
def _stdin(text: str) -> Iterator[Path]:
    """Yield a file with this text in a folder of its own, which the sandbox shows."""
    with trees.scratch() as folder:
        (folder / "stdin").write_text(text)
        yield folder / "stdin"
