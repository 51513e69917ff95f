"""Verdicts on candidates' functions: what they return, compared outside of their sandbox.

The calls of a candidate run in one forked child of the supervisor, which knows the arguments of them all. It may lie
about its own return values: it holds no channel to the host, and cannot trace or kill the supervisor. Nor do candidates
meet: their sources lie in no folder of the sandbox, the supervisor wipes what it passed on, and a sandbox in which one
left a trace is replaced.
Comparing with what was expected happens on the host, where the candidate's code never runs.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_stages.errors import UsageError
from composer_stages.sandbox.contract import Limits, View
from composer_stages.sandbox.session import KILLED, Reply, SupervisorLost
from composer_stages.sandbox.supervised import SupervisedSandbox, probe


@dataclass(frozen=True)
class Call:
    """One candidate: a Python program, a function in it, and what to call it with; it is in no file."""

    source: bytes
    function: str
    arguments: Sequence[tuple]
    """Tuples of None, bool, int, float, str, list, tuple and dict."""
    file: str = "solution.py"
    """The name of the file that the program seems to be in."""


@dataclass(frozen=True)
class Answer:
    """The result of one call: a value, or an error (the name of an exception, "timeout" or "crash").

    The class name is part of `repr`, which kata digests into the outcome of an action.
    """

    value: Any = None
    """Built-in types only; any other object is {"__type__": name of its type}."""
    error: str | None = None


Answers = tuple[Answer, ...]
"""Of one candidate, one for each tuple of arguments, in order."""


def match(answers: Answers, expected: Sequence[Any]) -> bool:
    """Return whether every call returned the expected value, of the same type at every depth."""
    return len(answers) == len(expected) and all(
        answer.error is None and same(answer.value, value) for answer, value in zip(answers, expected, strict=True)
    )


def same(value: Any, expected: Any) -> bool:
    """Compare value and type at every depth: True is not 1, 1 is not 1.0, (1,) is not [1]; NaN is NaN."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict):
        # Sorted by repr, since keys of several types have no order.
        pairs = [sorted(((repr(k), k, v) for k, v in d.items()), key=lambda pair: pair[0]) for d in (value, expected)]
        return same(*pairs)
    return bool(value == expected or (value != value and expected != expected))


def judge(
    sandbox_kind: str, calls: Sequence[Call], limits: Limits | None = None, *, folder: Path | None = None
) -> list[Answers]:
    """Run each call in a process of its own, in one sandbox that shows nothing; `limits.wall_s` is for one Call.

    `folder`: one that the candidates may read and import from. Answers of each call, in order. `UsageError` where
    the sandbox does not work here or arguments are not built-in types.
    """
    probe(sandbox_kind)
    # One sandbox, a fork a candidate: 64 candidates take .1 s, in sandboxes of their own 1.4 s.
    with (
        tempfile.TemporaryDirectory(prefix="composer-judge-") as empty,
        SupervisedSandbox(sandbox_kind, folder or Path(empty), limits or Limits(), View(writable=False)) as sandbox,
    ):
        return [_answers(sandbox, call) for call in calls]


def _answers(sandbox: SupervisedSandbox, call: Call) -> Answers:
    reply = Reply(KILLED, False, "sandbox", 0, b"")
    content = (call.source, call.file, call.function, list(call.arguments))
    try:
        # Twice, since an earlier call may have ended this sandbox: no candidate pays for another. A candidate that ends
        # the fresh one as well has crashed.
        for _ in range(2):
            with suppress(SupervisorLost):
                reply = sandbox.ask({"kind": "call"}, content=content)
                break
    except ValueError as error:
        raise UsageError("sandbox.arguments-not-built-in", function=call.function, error=str(error)) from None
    # Output beyond the limit has a gap in the middle, so that no line of it can be trusted to be one answer.
    lines = reply.output.splitlines() if reply.output_bytes == len(reply.output) else []
    failure = Answer(error="timeout" if reply.timed_out else "crash")
    answers = tuple(_parsed(line) for line in lines[: len(call.arguments)])
    return answers + (failure,) * (len(call.arguments) - len(answers))


def _parsed(line: bytes) -> Answer:
    """Parse the answer in one line of a child, which may contain anything: what cannot be parsed is a crash."""
    try:
        kind, content = json.loads(line)
        value = decoded(content, DECODERS)
    # Every exception: the candidate chooses the bytes. OverflowError came from an integer where a float's text belongs.
    except Exception:
        return Answer(error="crash")
    if kind == "v":
        return Answer(value=value)
    return Answer(error=value if type(value) is str and value.isidentifier() else "crash")


def decoded(node: Any, decoders: "Decoders", depth: int = 0) -> Any:
    """Return the value of a tagged tree (guest/candidate.py: `encoded`), read by the decoder of each tag.

    Any Exception of a tree of another form.
    """
    # Deeper values could be decoded and would then exhaust the stack of whoever compares, prints or hashes them.
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if not isinstance(node, list):
        if node is None or type(node) in (bool, int):  # json.loads would also give float and str, which have tags
            return node
        raise ValueError(f"{node!r} has no tag")
    return decoders[node[0]](node[1:], lambda part: decoded(part, decoders, depth + 1))


def _decoded_dict(nodes: list[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
    pairs = [(read(key), read(value)) for key, value in nodes]
    refuse_chosen_hashes([key for key, _ in pairs])
    return dict(pairs)


def refuse_chosen_hashes(keys: Sequence[Any]) -> None:
    """Raise ValueError where many keys have one hash: 4 MB of such integers would stop the host for minutes."""
    if len(keys) > MANY_KEYS and len(set(map(hash, keys))) < len(keys) // 2:
        raise ValueError("keys that were chosen to have one hash")


DEEPEST = 100
"""Levels of a value."""
MANY_KEYS = 1000
Decoders = Mapping[str, Callable[[list[Any], Callable[[Any], Any]], Any]]
"""Tag -> what reads the rest of a list with this tag, given what reads a part of it."""
DECODERS: dict[str, Callable[[list[Any], Callable[[Any], Any]], Any]] = {
    "f": lambda nodes, _: float(bytes(nodes[0], "ascii")),  # only text: of an integer the float may overflow
    "s": lambda nodes, _: bytes.fromhex(nodes[0]).decode("utf-8", "surrogatepass"),
    "l": lambda nodes, read: [read(node) for node in nodes],
    "t": lambda nodes, read: tuple(read(node) for node in nodes),
    "d": _decoded_dict,
    "o": lambda nodes, read: {"__type__": read(nodes[0])},
}
