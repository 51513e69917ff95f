"""Kata tasks from a seed: a wrong function, an issue text, visible tests for the agent and hidden ones for the judge.

Task i of a split depends on the seed and on i alone, so a longer list starts with the shorter one.
"""

import random
import re
from functools import cache
from typing import Any

from stages.envs.base import Split, Task
from stages.envs.kata.language import (
    BY_NAME,
    FAMILIES,
    MODIFIER_BY_NAME,
    MODIFIERS,
    OPERATIONS,
    Modifier,
    Operation,
    expression,
    family,
)
from stages.messages import Message

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
