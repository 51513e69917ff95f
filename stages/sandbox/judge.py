"""Verdicts on candidates' functions: what they return, compared outside of their sandbox.

Each call runs in a forked child of the supervisor, which is given the candidate's source and the arguments of this
call, and nothing else: the arguments of one call may be what another has to return. Of more than MOST_PROCESSES calls
several share a process, dealt at random: code that looks results up among arguments finds few. A child may lie about
its own return values: it holds no channel to the host, and cannot trace or kill the supervisor. Nor do processes meet:
sources and arguments lie in no folder of the sandbox, the supervisor wipes what it passed on, and a sandbox in which
one left a trace is replaced.
Comparing with what was expected happens on the host, where the candidate's code never runs.
"""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_stages.errors import UsageError
from composer_stages.sandbox.contract import Limits, View
from composer_stages.sandbox.equality import equal
from composer_stages.sandbox.guest.values import decoded
from composer_stages.sandbox.session import KILLED, Reply, SupervisorLost
from composer_stages.sandbox.supervised import SupervisedSandbox, probe

MOST_PROCESSES = 64
"""Processes for the calls of one candidate."""


@dataclass(frozen=True)
class Call:
    """One candidate: a Python program, a function in it, and what to call it with; it is in no file."""

    source: bytes
    function: str
    arguments: Sequence[tuple]
    """Tuples of what marshal takes: None, bool, numbers, str, bytes, and lists, tuples, dicts and sets of them."""
    file: str = "solution.py"
    """The name of the file that the program seems to be in."""
    in_one_process: bool = False
    """Whether the calls run in one process, in order, for functions with a state. It knows all arguments."""


@dataclass(frozen=True)
class Answer:
    """The result of one call: a value, or an error (the name of an exception, "timeout" or "crash").

    The class name is part of `repr`, which kata digests into the outcome of an action.
    """

    value: Any = None
    """Of the types that guest/values.py decodes; any other object is a `Foreign`."""
    error: str | None = None
    classes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Of an exception: its class and the bases of it, as `class_names` returns them."""


Answers = tuple[Answer, ...]
"""Of one candidate, one for each tuple of arguments, in order."""


def match(answers: Answers, expected: Sequence[Any]) -> bool:
    """Return whether every call returned the expected value."""
    return len(answers) == len(expected) and all(
        answer.error is None and equal(answer.value, value) for answer, value in zip(answers, expected, strict=True)
    )


def judge(
    sandbox_kind: str,
    calls: Sequence[Call],
    limits: Limits | None = None,
    *,
    folder: Path | None = None,
    packages: Sequence[Path] = (),
) -> list[Answers]:
    """Run the calls in processes of their own, in one sandbox that shows nothing; `limits.wall_s` is for one Call.

    `folder`: one that the candidates may read and import from; `packages`: as of `View`. Answers of each call, in
    order. `UsageError` where the sandbox does not work here or arguments are not built-in types.
    """
    probe(sandbox_kind)
    # One sandbox, a fork a call: 64 take .1 s, in sandboxes of their own 1.4 s.
    with (
        tempfile.TemporaryDirectory(prefix="composer-judge-") as empty,
        SupervisedSandbox(
            sandbox_kind, folder or Path(empty), limits or Limits(), View(writable=False, packages=packages)
        ) as sandbox,
    ):
        return [_answers(sandbox, call) for call in calls]


def _answers(sandbox: SupervisedSandbox, call: Call) -> Answers:
    """Return the answers of a candidate, whose calls have the time of one."""
    deadline = time.monotonic() + sandbox.limits.wall_s
    numbers = list(range(len(call.arguments)))
    processes = 1 if call.in_one_process else min(len(numbers), MOST_PROCESSES)
    if processes < len(numbers) and not call.in_one_process:
        random.SystemRandom().shuffle(numbers)
    answers = [Answer(error="timeout")] * len(numbers)
    for start in range(processes):
        dealt, remaining_s = numbers[start::processes], deadline - time.monotonic()
        if remaining_s > 0:
            results = _answers_of_process(sandbox, call, [call.arguments[number] for number in dealt], remaining_s)
            for number, answer in zip(dealt, results, strict=True):
                answers[number] = answer
    return tuple(answers)


def _answers_of_process(
    sandbox: SupervisedSandbox, call: Call, arguments: Sequence[tuple], wall_s: float
) -> tuple[Answer, ...]:
    reply = Reply(KILLED, False, "sandbox", 0, b"")
    content = (call.source, call.file, call.function, list(arguments))
    try:
        # Twice, since an earlier call may have ended this sandbox: no candidate pays for another. A candidate that ends
        # the fresh one as well has crashed.
        for _ in range(2):
            with suppress(SupervisorLost):
                reply = sandbox.ask({"kind": "call"}, wall_s, content)
                break
    except ValueError as error:
        raise UsageError("sandbox.arguments-not-built-in", function=call.function, error=str(error)) from None
    # Output beyond the limit has a gap in the middle, so that no line of it can be trusted to be one answer.
    lines = reply.output.splitlines() if reply.output_bytes == len(reply.output) else []
    failure = Answer(error="timeout" if reply.timed_out else "crash")
    answers = tuple(_parsed(line) for line in lines[: len(arguments)])
    return answers + (failure,) * (len(arguments) - len(answers))


def _parsed(line: bytes) -> Answer:
    """Parse the answer in one line of a child, which may contain anything: what cannot be parsed is a crash."""
    try:
        kind, content, *bases = json.loads(line)
        value, classes = decoded(content), tuple(map(str, decoded(bases[0]))) if bases else ()
    # Every exception: the candidate chooses the bytes. OverflowError came from an integer where a float's text belongs.
    except Exception:
        return Answer(error="crash")
    if kind == "v":
        return Answer(value=value)
    is_name = type(value) is str and value.isidentifier()
    return Answer(error=value, classes=classes) if is_name else Answer(error="crash")
