"""What a kata can ask for: twelve operations on two integers, eight modifiers of their result, and the words for both.

A family is one (operation, modifier) pair. Families are split between train and eval, so an evaluation task is a
combination that no training prompt, transcript or pair contains, although each of its two parts occurs in training.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stages.envs.base import Split


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
