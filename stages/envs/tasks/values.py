"""Tests of a row that are decided by values: calls of functions, and scripts with what they print and write.

The code under test runs in sandboxes that hold its tree, each call in a process that is given its own arguments and
nothing else. What it returns, raises, prints or writes leaves the sandbox and is compared here with what is expected,
which is not sent into it. shown.py tells where a row shows it all the same.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.envs import folders
from composer_stages.envs.repo import grading, runner, trees
from composer_stages.envs.repo.grading import TestOutcomes
from composer_stages.envs.repo.task import RunTask
from composer_stages.json_text import restored
from composer_stages.layout import shortened
from composer_stages.runs import store
from composer_stages.sandbox import Answer, Call, judge
from composer_stages.sandbox.bubblewrap import TESTBED
from composer_stages.sandbox.equality import equal, equal_texts, formatted, is_raised
from composer_stages.swebench.lists import Statuses
from composer_stages.words import Sentence

PROGRAMS = load_toml(__package__, "programs.toml")
EXACT = ("args", "kwargs", "returns")
"""Fields of a call that hold JSON of any kind; a row has them as `json_text.exact` returns them."""
LONGEST = 200
"""Characters of a value in the log."""
MOST_LINKS = 40
"""Absolute links one behind the other; Linux follows as many."""
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


def compare_values(kind: str, row: Mapping[str, Any], reference: Callable[[Path], None] | None) -> RunTask:
    """Return a runner of the calls and scripts of a row, in sandboxes of this kind.

    `reference` writes the tree of the reference solution into a folder; None where there is none.
    """

    def run(folder: Path) -> TestOutcomes:
        failures, reason = _calls(kind, row, folder), ""
        if any(failures) and _have_state(kind, row, reference):
            failures = _calls(kind, row, folder, in_one_process=True)
            reason = Sentence("envs.tasks.calls-with-state")
        failures += [_script(kind, row, script, folder) for script in row["script"]]
        statuses: Statuses = {}
        lines = []
        for name, failure in zip(test_names(row), failures, strict=True):
            statuses[name] = "failed" if failure else "passed"
            lines.append(f"FAIL {name}: {failure}" if failure else f"ok   {name}")
        log = "".join(f"{line}\n" for line in lines)
        return TestOutcomes(statuses, tampered=False, log=log, report_reason=reason)

    return run


_with_state: dict[str, bool] = {}
"""Digest of a row -> whether its calls need what earlier ones left."""


def _have_state(kind: str, row: Mapping[str, Any], reference: Callable[[Path], None] | None) -> bool:
    """Return whether calls need what earlier ones left: equal ones differ, or the reference solution needs it."""
    digest = store.digest(dict(row))
    if digest not in _with_state:
        _with_state[digest] = len(row["calls"]) > 1 and _find_state(kind, row, reference)
    return _with_state[digest]


def _find_state(kind: str, row: Mapping[str, Any], reference: Callable[[Path], None] | None) -> bool:
    inputs, results = (
        {formatted([call[name] for name in names]) for call in calls_of(row)}
        for names in (("function", "args", "kwargs"), ("function", "args", "kwargs", "returns", "raises"))
    )
    if len(results) > len(inputs) or reference is None:
        return len(results) > len(inputs)
    with trees.scratch() as tree:
        reference(tree)
        return any(_calls(kind, row, tree)) and not any(_calls(kind, row, tree, in_one_process=True))


def _calls(kind: str, row: Mapping[str, Any], folder: Path, *, in_one_process: bool = False) -> list[str]:
    """Run the calls; return for each the difference from the expected result, "" for none."""
    groups = [(function, [*calls]) for function, calls in groupby(calls_of(row), lambda call: call["function"])]
    requests = []
    for function, calls in groups:
        module, _, name = function.partition(":")
        source = PROGRAMS["caller"].format(module=module, name=name).encode()
        arguments = [(tuple(call["args"]), call["kwargs"]) for call in calls]
        requests.append(Call(source, "call", arguments, "composer_caller.py", in_one_process))
    if not requests:
        return []
    answered = judge(kind, requests, replace(grading.LIMITS, wall_s=row["timeout_s"]), folder=folder)
    answers = (answer for group in answered for answer in group)
    return [*map(_wrong_answer, calls_of(row), answers)]


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
        # A file from before the script is not one that it wrote, also in a folder behind a link.
        named = (PurePosixPath(path) for path in script["files"])
        trees.apply({str(PurePosixPath(_follow(tree, str(path.parent)), path.name)): None for path in named}, tree)
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
            file = folders.read(tree, _follow(tree, path))
            content = None if file is None else file[0].decode(errors="replace")
            if content is None or not is_same(content, text):
                written = "no such file" if content is None else _short(repr(content))
                return f"{path} holds {written}, not {_short(repr(text))}"
    return ""


def _follow(tree: Path, path: str) -> str:
    """Return the path that a path names through links inside a tree; of a link out of it, the path itself."""
    root = tree.resolve()
    target = Path(os.path.realpath(root / path))
    for _ in range(MOST_LINKS):
        if target.is_relative_to(TESTBED):  # an absolute link, as the sandbox has the tree
            target = Path(os.path.realpath(root / target.relative_to(TESTBED)))
    return str(target.relative_to(root)) if target.is_relative_to(root) else path


@contextmanager
def _stdin(text: str) -> Iterator[Path]:
    """Yield a file with this text in a folder of its own, which the sandbox shows."""
    with trees.scratch() as folder:
        (folder / "stdin").write_text(text)
        yield folder / "stdin"
