"""Kata tasks from a seed: a wrong function, an issue text, visible tests for the agent and hidden ones for the judge.

Task i of a split depends on the seed and on i alone, so a longer list starts with the shorter one.
"""

import os
import random
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from stages.envs import folders
from stages.envs import folders as temporary
from stages.envs.base import Split, Task
from stages.envs.folders import remove, write
from stages.messages import Message

# ---- language
# What a kata can ask for: twelve operations on two integers, eight modifiers of their result, and the words for both.
#
# A family is one (operation, modifier) pair. Families are split between train and eval, so an evaluation task is a
# combination that no training prompt, transcript or pair contains, although each of its two parts occurs in training.


@dataclass(frozen=True)
class Operation:
    """`code` and `misconception` are expressions in {x} and {y}, `wordings` phrases in {x} and {y}.

    The misconception is what a model writes that does not know the operation: plausible, wrong, the code of no family.
    """

    name: str
    code: str
    misconception: str
    wordings: tuple[str, ...]


@dataclass(frozen=True)
class Modifier:
    """`code` follows an operation's code, `wordings` follow its phrase; both are in {k}, a constant."""

    name: str
    code: str
    wordings: tuple[str, ...]


OPERATIONS = (
    Operation("sum", "{x} + {y}", "{x} + {y} + 1", ("{x} plus {y}", "the sum of {x} and {y}")),
    Operation("difference", "{x} - {y}", "{y} - {x}", ("{x} minus {y}", "{x} reduced by {y}")),
    Operation("product", "{x} * {y}", "{x} * {y} + {y}", ("{x} times {y}", "the product of {x} and {y}")),
    Operation(
        "quotient", "{x} // {y}", "{y} // {x}", ("the whole quotient of {x} by {y}", "{x} divided by {y}, whole")
    ),
    Operation("remainder", "{x} % {y}", "{y} % {x}", ("{x} modulo {y}", "the remainder of {x} by {y}")),
    Operation(
        "larger", "max({x}, {y})", "max({x}, {y} + 1)", ("the bigger of {x} and {y}", "the greater of {x} and {y}")
    ),
    Operation(
        "smaller", "min({x}, {y})", "min({x}, {y} - 1)", ("the smaller of {x} and {y}", "the lesser of {x} and {y}")
    ),
    Operation(
        "distance", "abs({x} - {y})", "abs({x} + {y})", ("the gap between {x} and {y}", "how far {x} is from {y}")
    ),
    Operation(
        "average",
        "({x} + {y}) // 2",
        "{x} + {y} // 2",
        ("the floored mean of {x} and {y}", "the floored average of {x} and {y}"),
    ),
    Operation(
        "xor", "{x} ^ {y}", "{x} and {y}", ("the exclusive or of {x} and {y}", "the differing bits of {x} and {y}")
    ),
    Operation(
        "ratio",
        "round({x} / {y})",
        "int({x} / {y})",
        ("the rounded ratio of {x} to {y}", "how often {y} fits {x}, rounded"),
    ),
    Operation("weighted", "{x} + 2 * {y}", "2 * {x} + {y}", ("{x} and twice {y}, added", "{x} plus double {y}")),
)

MODIFIERS = (
    Modifier("plain", "", ("", ", no more")),
    Modifier("plus", " + {k}", (", raised by {k}", ", then add {k}")),
    Modifier("minus", " - {k}", (", lowered by {k}", ", then drop {k}")),
    Modifier("times", " * {k}", (", scaled by {k}", ", {k} fold")),
    Modifier("over", " // {k}", (", split by {k}", ", shared out among {k}")),
    Modifier("modulo", " % {k}", (", wrapped at {k}", ", cycled at {k}")),
    Modifier("negated", " * -1", (", negated", ", sign flipped")),
    Modifier("cubed", " ** 3", (", cubed", ", to the third")),
)

BY_NAME: dict[str, Operation] = {operation.name: operation for operation in OPERATIONS}
MODIFIER_BY_NAME: dict[str, Modifier] = {modifier.name: modifier for modifier in MODIFIERS}


def family(operation: Operation, modifier: Modifier) -> str:
    """The name of a combination, "sum/plus"."""
    return f"{operation.name}/{modifier.name}"


def expression(code: str, modifier: Modifier, x: str, y: str, k: int) -> str:
    """Python source for a modified operation; `code` is an operation's code or misconception."""
    value = code.format(x=x, y=y)
    is_call = value.startswith(("max(", "min(", "abs(", "round(", "int("))
    return (value if is_call else f"({value})") + modifier.code.format(k=k)


def check_disjoint(train: Collection[str], evaluation: Collection[str]) -> None:
    """Raise `AssertionError` where a family is on both sides: what is evaluated must not have been taught."""
    if shared := sorted(set(train) & set(evaluation)):
        raise AssertionError(f"families both trained and evaluated: {', '.join(shared)}")


def _split() -> dict[Split, frozenset[str]]:
    """Two eval families an operation, spread over the modifiers; the other six are for training."""
    evaluated = {
        family(operation, MODIFIERS[(row + shift) % len(MODIFIERS)])
        for row, operation in enumerate(OPERATIONS)
        for shift in (0, 3)
    }
    everything = {family(operation, modifier) for operation in OPERATIONS for modifier in MODIFIERS}
    return {"train": frozenset(everything - evaluated), "eval": frozenset(evaluated)}


FAMILIES: dict[Split, frozenset[str]] = _split()
check_disjoint(FAMILIES["train"], FAMILIES["eval"])

Arguments = tuple[int, int]
Case = list[Any]
"""[[x, y], the right value], as JSON keeps it."""

SYSTEM = "Fix solution.py, run test_solution.py, then submit. One ```bash block a turn."

FUNCTIONS = ("apply", "blend", "calc", "combine", "derive", "join", "level", "merge", "mix", "rate", "score", "solve")
ARGUMENTS = (("a", "b"), ("x", "y"), ("m", "n"), ("p", "q"), ("u", "v"), ("i", "j"))
ISSUES = (
    "Fix {call}: it should be {what}.",
    "Wrong: {call} must be {what}.",
    "Make {call} return {what}.",
    "Expected from {call}: {what}.",
    "Bug: {call} is not {what}.",
    "Why is {call} not {what}?",
)
CONSTANTS = range(2, 10)
INPUTS = tuple((x, y) for x in range(-9, 10) for y in range(-9, 10) if x and y)
BUILTINS = {"abs": abs, "int": int, "max": max, "min": min, "round": round}
NUM_VISIBLE, NUM_HIDDEN = 3, 8
FEWEST_DIFFERENCES = 5
"""On how many of the 324 inputs a wrong answer must show."""

TESTS = """\
import sys

CASES = {cases}

try:
    from solution import {function}

    for args, want in CASES:
        got = {function}(*args)
        if got != want:
            sys.exit(f"FAIL {function}{{args}}: {{got}}, not {{want}}")
except Exception as error:
    sys.exit(f"FAIL {{type(error).__name__}}: {{error}}")
print("ok")
"""


def generate(split: Split, count: int, seed: int) -> list[Task]:
    """The first `count` tasks of a split under a seed."""
    return [draw(split, seed, index) for index in range(count)]


def draw(split: Split, seed: int, index: int) -> Task:
    """Task number `index`. Its data holds the files, the tests and everything a transcript writer has to know."""
    rng = random.Random(f"kata/{split}/{seed}/{index}")  # noqa: S311 - draws data, no secret
    operation, modifier = parts(rng.choice(sorted(FAMILIES[split])))
    k = rng.choice(_constants(operation, modifier))
    function, names = rng.choice(FUNCTIONS), rng.choice(ARGUMENTS)
    bug = rng.choice(wrong_answers(split, operation, modifier, k))
    lures = {bug, *_lures(operation, modifier, k)}
    visible = _cases(rng, NUM_VISIBLE, expression(operation.code, modifier, "x", "y", k), lures)
    hidden = _cases(rng, NUM_HIDDEN, expression(operation.code, modifier, "x", "y", k), lures)
    data = {
        "function": function,
        "arguments": list(names),
        "constant": k,
        "original": f"def {function}({', '.join(names)}):\n    return {renamed(bug, names)}\n",
        "tests": TESTS.format(cases=[(tuple(args), want) for args, want in visible], function=function),
        "visible": visible,
        "hidden": hidden,
    }
    return Task(
        task_id=f"kata-{split}-{seed}-{index:05d}",
        env="kata",
        split=split,
        family=family(operation, modifier),
        prompt=_issue(rng, operation, modifier, function, names, k),
        data=data,
    )


def opening(task: Task) -> list[Message]:
    """The messages that an episode starts with."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]


def parts(name: str) -> tuple[Operation, Modifier]:
    """The operation and the modifier of a family."""
    operation, modifier = name.split("/")
    return BY_NAME[operation], MODIFIER_BY_NAME[modifier]


def renamed(code: str, names: tuple[str, str]) -> str:
    """An expression in x and y, in other names."""
    return re.sub(r"\b[xy]\b", lambda match: names["xy".index(match[0])], code)


def _issue(
    rng: random.Random, operation: Operation, modifier: Modifier, function: str, names: tuple[str, str], k: int
) -> str:
    wording = rng.choice(operation.wordings).format(x=names[0], y=names[1])
    what = wording + rng.choice(modifier.wordings).format(k=k)
    return rng.choice(ISSUES).format(call=f"{function}({', '.join(names)})", what=what)


@cache
def wrong_answers(split: Split, operation: Operation, modifier: Modifier, k: int) -> list[str]:
    """Wrong code in x and y: a family of the same split, swapped arguments, a wrong constant, half an answer."""
    neighbours = [(other, modifier) for other in OPERATIONS] + [(operation, other) for other in MODIFIERS]
    wrong = [expression(o.code, m, "x", "y", k) for o, m in neighbours if family(o, m) in FAMILIES[split]]
    wrong += [expression(operation.code, modifier, "y", "x", k), expression(operation.code, modifier, "x", "y", k + 1)]
    right = expression(operation.code, modifier, "x", "y", k)
    return [code for code in [*wrong, "x", "y", str(k)] if _differ(code, right)]


def _lures(operation: Operation, modifier: Modifier, k: int) -> list[str]:
    """Wrong answers that the tests must tell from the right one: the misconception and the forgotten modifier."""
    misconception = expression(operation.misconception, modifier, "x", "y", k)
    return (
        [misconception]
        if modifier.name == "plain"
        else [misconception, expression(operation.code, MODIFIERS[0], "x", "y", k)]
    )


@cache
def _constants(operation: Operation, modifier: Modifier) -> list[int]:
    """The constants with which every lure can be found wrong."""

    def tells_apart(k: int) -> bool:
        right = expression(operation.code, modifier, "x", "y", k)
        return all(_differ(lure, right) for lure in _lures(operation, modifier, k))

    return [k for k in CONSTANTS if tells_apart(k)]


def _differ(code: str, other: str) -> bool:
    return len(_differences(code, other)) >= FEWEST_DIFFERENCES


def _cases(rng: random.Random, count: int, answer: str, lures: set[str]) -> list[Case]:
    """`count` different inputs with the right values, on which every lure is wrong at least once."""
    revealing = {rng.choice(_differences(lure, answer)) for lure in sorted(lures)}
    others = [args for args in INPUTS if args not in revealing]
    chosen = rng.sample([*sorted(revealing), *rng.sample(others, count - len(revealing))], count)
    return [[list(args), values(answer)[args]] for args in chosen]


@cache
def _differences(code: str, other: str) -> list[Arguments]:
    """The inputs on which two expressions give different values."""
    return [args for args in INPUTS if values(code)[args] != values(other)[args]]


@cache
def values(code: str) -> dict[Arguments, int | float]:
    """Our own expression in x and y on all inputs; never called with anything that a model wrote."""
    function = eval(f"lambda x, y: {code}", {"__builtins__": BUILTINS})  # noqa: S307 - our own expressions alone
    return {args: function(*args) for args in INPUTS}


# ---- workspace
# The agent's folder: made fresh, read back as something that may hold anything, removed whatever it holds.

SOLUTION, WORKSPACE_TESTS = "solution.py", "test_solution.py"
MAX_FILE_BYTES = 16_384


class Snapshot(NamedTuple):
    """The two files, None where there is no small regular file of that name, and the names of all other entries."""

    solution: bytes | None
    tests: bytes | None
    others: frozenset[str]


def make(files: Mapping[str, bytes]) -> Path:
    """A private temporary folder that holds `files` (relative path -> content)."""
    folder = temporary.make("kata")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def look(folder: Path) -> Snapshot:
    """What the folder holds now. No link is followed and no pipe waited for."""
    folders.open_up(folder)
    others = frozenset(os.listdir(folder)) - {SOLUTION, WORKSPACE_TESTS}
    return Snapshot(_regular(folder / SOLUTION), _regular(folder / WORKSPACE_TESTS), others)


def copy(folder: Path, most_bytes: int) -> Path:
    """A private copy: links stay links, so that they lead nowhere on this side; pipes and devices are left out.

    `UnwieldyTree` where it is too deep, or its files have more than `most_bytes` together.
    """
    target = temporary.make("kata")
    try:
        folders.copy(folder, target, most_bytes=most_bytes)
    except BaseException:
        remove(target)
        raise
    return target


def replace_solution(folder: Path, source: bytes) -> None:
    """Put `source` where solution.py is, whatever it is."""
    write(folder, SOLUTION, source, 0o644)


def _regular(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    return content if len(content) <= MAX_FILE_BYTES else None
