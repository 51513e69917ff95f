"""The bare words after a stage's name, for the stages that take some: `composer export FORMAT RUN`."""

from collections.abc import Sequence
from typing import Any

from composer_cli.settings import nested
from stages import STAGES, typed
from stages.errors import UsageError


def read(stage: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the words say: layers of settings, and runs to read; `UsageError` when there are too many."""
    meaning = STAGES[stage].positionals
    if meaning == ("paths",):
        return [nested("paths", list(words))] if words else [], []
    if len(words) > len(meaning):
        expected = f"`{typed(stage)} {STAGES[stage].usage}`".replace(" `", "`")
        raise UsageError(f"{words[len(meaning)]!r} is one word too many: it is {expected}.")
    said = dict(zip(meaning, words, strict=False))
    runs = [said.pop("run")] if "run" in said else []
    return [nested(key, word) for key, word in said.items()], runs
