"""Kata tasks from a seed: a wrong function, an issue text, visible tests for the agent and hidden ones for the judge.

A task asks for one of twelve operations on two integers with one of eight modifiers of its result. A family is one
(operation, modifier) pair. Families are split between train and eval, so an evaluation task is a combination that no
training prompt, transcript or pair contains, although each of its two parts occurs in training.

Task i of a split depends on the seed and on i alone, so a longer list starts with the shorter one. The order of random
draws is part of every task: a changed order changes all of them, and the small models trained on them.
"""

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from composer_stages.data_files import load_toml
from composer_stages.envs.base import Split, Task
from composer_stages.messages import Message

SOLUTION, WORKSPACE_TESTS = "solution.py", "test_solution.py"
"""The files of the agent's folder."""


@dataclass(frozen=True)
class Operation:
    """`code` and `misconception` are expressions in {x} and {y}, `wordings` phrases in {x} and {y}.

    The misconception is the answer of a model that does not know the operation: plausible, wrong, the code of no
    family.
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


DATA = load_toml(__package__, "tasks.toml")
SYSTEM: str = DATA["system"]
OPERATIONS = tuple(
    Operation(name, code, misconception, tuple(wordings))
    for name, (code, misconception, wordings) in DATA["operations"].items()
)
MODIFIERS = tuple(Modifier(name, code, tuple(wordings)) for name, (code, wordings) in DATA["modifiers"].items())
BY_NAME: dict[str, Operation] = {operation.name: operation for operation in OPERATIONS}
MODIFIER_BY_NAME: dict[str, Modifier] = {modifier.name: modifier for modifier in MODIFIERS}


def family(operation: Operation, modifier: Modifier) -> str:
    """Return the name of a combination, "sum/plus"."""
    return f"{operation.name}/{modifier.name}"


def expression(code: str, modifier: Modifier, x: str, y: str, k: int) -> str:
    """Return Python source for a modified operation; `code` is an operation's code or misconception."""
    value = code.format(x=x, y=y)
    # Brackets, as a modifier's operator binds more tightly than most operations: (x + y) * 3. A call needs none.
    is_call = value.startswith(("max(", "min(", "abs(", "round(", "int("))
    return (value if is_call else f"({value})") + modifier.code.format(k=k)


# By family and not by task: only 576 issue texts exist, so a split by task alone would evaluate on issues seen in
# training.
EVAL_FAMILIES = frozenset(
    family(operation, MODIFIERS[(row + shift) % len(MODIFIERS)])
    for row, operation in enumerate(OPERATIONS)
    for shift in (0, 3)
)
"""Two for each operation, spread over the modifiers; the other six are for training."""
FAMILIES: dict[Split, frozenset[str]] = {
    "train": frozenset(family(operation, modifier) for operation in OPERATIONS for modifier in MODIFIERS)
    - EVAL_FAMILIES,
    "eval": EVAL_FAMILIES,
}

Arguments = tuple[int, int]
Case = list[Any]
"""[[x, y], the right value], as stored in JSON."""

CONSTANTS = range(2, 10)  # 0 cannot divide, and 1 leaves `times` and `over` without effect
# Without 0, by which no operation could divide.
INPUTS = tuple((x, y) for x in range(-9, 10) for y in range(-9, 10) if x and y)
BUILTINS = {"abs": abs, "int": int, "max": max, "min": min, "round": round}
NUM_VISIBLE, NUM_HIDDEN = 3, 8
FEWEST_DIFFERENCES = 5
"""Number of the 324 inputs on which a wrong answer must give a wrong value."""


def generate(split: Split, count: int, seed: int) -> list[Task]:
    """Return the first `count` tasks of a split under a seed; no family is in both splits."""
    return [draw(split, seed, index) for index in range(count)]


def draw(split: Split, seed: int, index: int) -> Task:
    """Return task number `index`; its data holds the files, the tests and all that a transcript is written from."""
    # A string seeds through SHA-512: the same in every process, unlike hash().
    rng = random.Random(f"kata/{split}/{seed}/{index}")  # noqa: S311 - draws data, no secret
    operation, modifier = split_family(rng.choice(sorted(FAMILIES[split])))
    k = rng.choice(_revealing_constants(operation, modifier))
    function, names = rng.choice(DATA["functions"]), tuple(rng.choice(DATA["arguments"]))
    bug = rng.choice(wrong_answers(split, operation, modifier, k))
    lures = {bug, *_lures(operation, modifier, k)}
    right = expression(operation.code, modifier, "x", "y", k)
    visible = _cases(rng, NUM_VISIBLE, right, lures)
    hidden = _cases(rng, NUM_HIDDEN, right, lures)
    operand_phrase = rng.choice(operation.wordings).format(x=names[0], y=names[1])
    phrase = operand_phrase + rng.choice(modifier.wordings).format(k=k)
    call = f"{function}({', '.join(names)})"
    data = {
        "function": function,
        "arguments": list(names),
        "constant": k,
        "original": f"def {call}:\n    return {rename_arguments(bug, names)}\n",
        "tests": DATA["tests"].format(cases=[(tuple(args), want) for args, want in visible], function=function),
        "visible": visible,
        "hidden": hidden,
    }
    return Task(
        task_id=f"kata-{split}-{seed}-{index:05d}",
        env="kata",
        split=split,
        family=family(operation, modifier),
        prompt=rng.choice(DATA["issues"]).format(call=call, what=phrase),
        data=data,
    )


def opening(task: Task) -> list[Message]:
    """Return the messages that a rollout starts with."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]


def split_family(name: str) -> tuple[Operation, Modifier]:
    """Return the operation and the modifier of a family."""
    operation, modifier = name.split("/")
    return BY_NAME[operation], MODIFIER_BY_NAME[modifier]


def rename_arguments(code: str, names: tuple[str, str]) -> str:
    """Return an expression in x and y with other names."""
    return re.sub(r"\b[xy]\b", lambda match: names["xy".index(match[0])], code)


@cache
def wrong_answers(split: Split, operation: Operation, modifier: Modifier, k: int) -> list[str]:
    """Return wrong code in x and y: a family of the same split, swapped arguments, a wrong constant, half an answer."""
    neighbours = [(neighbour, modifier) for neighbour in OPERATIONS] + [
        (operation, neighbour) for neighbour in MODIFIERS
    ]
    wrong = [expression(o.code, m, "x", "y", k) for o, m in neighbours if family(o, m) in FAMILIES[split]]
    wrong += [expression(operation.code, modifier, "y", "x", k), expression(operation.code, modifier, "x", "y", k + 1)]
    right = expression(operation.code, modifier, "x", "y", k)
    return [code for code in [*wrong, "x", "y", str(k)] if len(_differences(code, right)) >= FEWEST_DIFFERENCES]


def _lures(operation: Operation, modifier: Modifier, k: int) -> list[str]:
    """Return wrong answers that the tests must reject: the misconception and the forgotten modifier."""
    misconception = expression(operation.misconception, modifier, "x", "y", k)
    forgotten = [] if modifier.name == "plain" else [expression(operation.code, MODIFIERS[0], "x", "y", k)]
    return [misconception, *forgotten]


@cache
def _revealing_constants(operation: Operation, modifier: Modifier) -> list[int]:
    """Return the constants with which every lure gives enough wrong values."""
    constants = []
    for k in CONSTANTS:
        right = expression(operation.code, modifier, "x", "y", k)
        lures = _lures(operation, modifier, k)
        if all(len(_differences(lure, right)) >= FEWEST_DIFFERENCES for lure in lures):
            constants.append(k)
    return constants


def _cases(rng: random.Random, count: int, answer: str, lures: set[str]) -> list[Case]:
    """Draw `count` different inputs with the right values, on which every lure is wrong at least once."""
    # Sorted: the order of a set of strings changes from process to process, and with it the draws.
    revealing = {rng.choice(_differences(lure, answer)) for lure in sorted(lures)}
    # Several lures may share a revealing input, so that the rest is filled up to `count` at random.
    candidates = [args for args in INPUTS if args not in revealing]
    inputs = rng.sample([*sorted(revealing), *rng.sample(candidates, count - len(revealing))], count)
    return [[list(args), evaluate(answer)[args]] for args in inputs]


@cache
def _differences(code: str, reference: str) -> list[Arguments]:
    """Return the inputs on which two expressions give different values."""
    return [args for args in INPUTS if evaluate(code)[args] != evaluate(reference)[args]]


@cache
def evaluate(code: str) -> dict[Arguments, int | float]:
    """Evaluate one of our own expressions in x and y on all inputs; never called with text of a model."""
    # No builtins but these: an expression is a template of this file, filled with names and one number.
    function = eval(f"lambda x, y: {code}", {"__builtins__": BUILTINS})  # noqa: S307 - our own expressions alone
    return {args: function(*args) for args in INPUTS}
