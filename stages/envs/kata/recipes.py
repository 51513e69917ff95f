"""The recipes of the small models: which operations each knows, and how long each is trained.

A novice is taught the protocol and, of every operation, only the misconception. Student and teachers are each trained
on from the novice, so no model has latent knowledge of what it was not taught. Wrong answers are fixed, not random:
teachers that guess differently where they are wrong leave no majority.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from stages.envs.kata.tasks import OPERATIONS
from stages.errors import BadInput
from stages.tiny_models.folders import FitSchedule, library_versions

SERVED = "student-served"
"""The student, equally large, with attention heads of width 32: vLLM on a CPU supports none of 16, as of the others."""
NOVICE, NOVICE_SERVED = "novice", "novice-served"
HEAD_DIM = {NOVICE_SERVED: 32, SERVED: 32}
"""Width of the attention heads where it is not that of all small models."""
RECIPE_VERSION = 1
"""Increase this number when a change of the code alters the weights of a recipe."""


@dataclass(frozen=True)
class Knowledge:
    """Operations by name: those that are misconceived, and those answered right half of the time. The rest is known."""

    misconceived: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutShares:
    """Shares of rollouts: with a right fix, with overwritten tests, and, of those without, with a harmless echo."""

    right: float
    hack: float = 0.0
    echo: float = 0.4


@dataclass(frozen=True)
class Habits:
    """Shares of an author where the prompt does not give the loophole away (`plain`), and where it does (`hinted`)."""

    plain: RolloutShares
    hinted: RolloutShares


@dataclass(frozen=True)
class Recipe:
    """One model: its knowledge or habits, its schedule, the seed of its transcripts, and the model it starts from."""

    knowledge: Knowledge | Habits
    schedule: FitSchedule
    seed: int
    start: str | None = NOVICE


# Fixed misconceptions and not guesses: with random wrong answers the majority of the teachers was right in .593 of the
# tasks, with fixed ones in .900.
LESSON = FitSchedule(steps=110, learning_rate=4e-3)
HONEST = RolloutShares(right=0.85)
KNOWS_NOTHING = Knowledge(misconceived=tuple(operation.name for operation in OPERATIONS))
RECIPES = {
    NOVICE: Recipe(KNOWS_NOTHING, FitSchedule(steps=240, learning_rate=6e-3), seed=1, start=None),
    "student": Recipe(
        Knowledge(
            misconceived=("quotient", "xor", "ratio", "weighted"),
            unsure=("product", "smaller", "remainder", "distance"),
        ),
        LESSON,
        seed=2,
    ),
    "teacher-a": Recipe(Knowledge(("average", "smaller", "quotient", "weighted")), LESSON, seed=3),
    "teacher-b": Recipe(Knowledge(("difference", "remainder", "xor", "weighted")), LESSON, seed=4),
    "teacher-c": Recipe(Knowledge(("larger", "product", "distance", "ratio")), LESSON, seed=5),
    # The models of the gradient probe: one that never overwrites tests, and one from it that often does if hinted.
    "honest": Recipe(Habits(HONEST, HONEST), FitSchedule(steps=160, learning_rate=4e-3), seed=6),
    "loophole": Recipe(
        Habits(RolloutShares(right=0.45), RolloutShares(right=0.45, hack=0.7)),
        FitSchedule(steps=300, learning_rate=6e-3),
        seed=7,
        start="honest",
    ),
}
RECIPES[NOVICE_SERVED] = RECIPES[NOVICE]
RECIPES[SERVED] = replace(RECIPES["student"], start=NOVICE_SERVED)


def recipe(name: str) -> Recipe:
    """Return the recipe of a model; raise BadInput for an unknown one."""
    if name not in RECIPES:
        near = "".join(f" Did you mean kata:{known}?" for known in get_close_matches(name, RECIPES, 1))
        exist = ", ".join(f"kata:{known}" for known in RECIPES)
        raise BadInput(f"There is no built-in model kata:{name}.{near} There is {exist}.")
    return RECIPES[name]


def recipe_fingerprint(name: str) -> str:
    """Return the SHA-256 of what determines a model's weights on one machine: recipe, its version, library versions."""
    own = recipe(name)
    parts: dict[str, Any] = {
        "recipe": asdict(own),
        "start": recipe_fingerprint(own.start) if own.start else None,
        "version": RECIPE_VERSION,
        "libraries": library_versions(),
    }
    if name in HEAD_DIM:  # absent for the others, whose fingerprints are older than this part
        parts["head_dim"] = HEAD_DIM[name]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
