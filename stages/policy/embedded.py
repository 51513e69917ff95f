"""Models that environments bring along, such as `kata:student`: made on first use, then loaded like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stages import envs

EXAMPLE = "kata:student"


class ModelMaker(Protocol):
    """The module behind an environment's `models`; `name` is what follows the colon: a name, or a file of rows."""

    def recipe_fingerprint(self, name: str, /) -> str:
        """SHA-256 over all that determines the model's bytes."""
        ...

    def ensure(self, name: str, cache: Path, progress: Callable[[str, int, int], None], /) -> Path:
        """The model's folder in this cache, made first if it is not there."""
        ...


def is_embedded(model: str) -> bool:
    """Whether a model's name is `ENVIRONMENT:NAME` of an environment that brings models along."""
    environment, colon, _ = model.partition(":")
    entry = envs.ENVIRONMENTS.get(environment)
    return bool(colon and entry and entry.models)


def fingerprint(model: str) -> str:
    """SHA-256 over all that determines the model's bytes; `UsageError` when there is no such model."""
    maker, name = _maker(model)
    return maker.recipe_fingerprint(name)


def folder(model: str, cache: Path, listener: Callable[[str, int, int], None]) -> Path:
    """The model's folder in this cache, made first if it is not there; `listener` hears (what, done, of)."""
    maker, name = _maker(model)
    return maker.ensure(name, cache, listener)


def learning_rate(model: str) -> float | None:
    """The rate that suits training on from a model, where its maker has a constant `LEARNING_RATE`; else None."""
    return getattr(_maker(model)[0], "LEARNING_RATE", None) if is_embedded(model) else None


def _maker(model: str) -> tuple[ModelMaker, str]:
    environment, _, name = model.partition(":")
    return envs.attached(environment, "models"), name
