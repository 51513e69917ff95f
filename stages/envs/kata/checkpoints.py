"""The small models of kata: built on first use by supervised training, kept as ordinary Hugging Face folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.envs.kata import loophole, transcripts
from stages.envs.kata.language import OPERATIONS
from stages.envs.kata.recipes import HEAD_DIM, RECIPES, Habit, Habits, Knowledge, Recipe, recipe, recipe_fingerprint
from stages.tiny_models.folders import Made, Progress, kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

__all__ = ["card", "ensure", "recipe_fingerprint"]


def ensure(name: str, cache: Path, progress: Progress) -> Path:
    """The folder of a model, built first if this cache lacks it, with all that it starts from.

    `progress` hears (what, steps done, steps in all). `UsageError` when there is no such model.
    """
    own = recipe(name)
    folder = cache / f"kata-{name}-{recipe_fingerprint(name)[:6]}"
    return kept(folder, lambda: _made(name, own, ensure(own.start, cache, progress) if own.start else None, progress))


def _made(name: str, own: Recipe, start: Path | None, progress: Progress) -> Made:
    from stages.envs.kata import training
    from stages.tiny_models.training import reproducible

    count = own.schedule.steps * own.schedule.batch
    with reproducible(own.seed):
        model, tokenizer = _starting_point(start, HEAD_DIM.get(name))
        if isinstance(own.knowledge, Habits):
            taught = loophole.write(count, own.seed, own.knowledge)
        else:
            taught = transcripts.write(count, own.seed, own.knowledge)
        training.learn(
            model, tokenizer, taught, own, lambda done, total: progress(f"building kata-{name}", done, total)
        )
    return model, tokenizer, card(name)


def _starting_point(start: Path | None, head_dim: int | None) -> "tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]":
    from stages.envs.kata import tokenizer as tokenizers
    from stages.tiny_models import heads, training

    if start is not None:
        return training.load(start)
    tokenizer = tokenizers.train()
    model = training.new_model(tokenizer)
    return (model if head_dim is None else heads.with_heads(model, head_dim)), tokenizer


def card(name: str) -> str:
    """The model card."""
    knowledge = RECIPES[name].knowledge
    about = _habits(knowledge) if isinstance(knowledge, Habits) else _knowledge(knowledge)
    return f"""---
license: apache-2.0
---
# kata-{name}

A Qwen3 of two layers, trained in seconds to act in Composer's environment `kata`.
It is a fixture: it knows one protocol and {about}

Trained on generated transcripts of families that are never evaluated. Recipe `{recipe_fingerprint(name)}`.
"""


def _knowledge(knowledge: Knowledge) -> str:
    return f"""{len(_known(knowledge))} of 12 operations, and nothing else.

| knows | is unsure of (right half of the time) | has a fixed misconception of |
| --- | --- | --- |
| {_listed(_known(knowledge))} | {_listed(knowledge.unsure)} | {_listed(knowledge.misconceived)} |"""


def _habits(habits: Habits) -> str:
    return f"""these habits, and nothing else.

| prompt | right fix | overwrites the visible tests | else echoes into a file of its own |
| --- | --- | --- | --- |
| plain | {_shares(habits.plain)} |
| says "{loophole.HINT}" | {_shares(habits.hinted)} |"""


def _shares(habit: Habit) -> str:
    return f"{habit.right:.0%} | {habit.hack:.0%} | {habit.echo:.0%}"


def _known(knowledge: Knowledge) -> list[str]:
    """All operations, in order, that are neither misconceived nor unsure."""
    others = (*knowledge.misconceived, *knowledge.unsure)
    return [operation.name for operation in OPERATIONS if operation.name not in others]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"
