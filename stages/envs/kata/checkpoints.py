"""The small models of kata: built on first use by supervised training, kept as ordinary Hugging Face folders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from stages.envs.kata import transcripts
from stages.envs.kata.recipes import (
    HEAD_DIM,
    KNOWS_NOTHING,
    RECIPES,
    Habit,
    Habits,
    Knowledge,
    Recipe,
    recipe,
    recipe_fingerprint,
)
from stages.envs.kata.tasks import OPERATIONS
from stages.envs.kata.transcripts import HINT, TaughtTranscript, loophole_write, write
from stages.tiny_models.folders import Made, Progress, kept
from stages.tiny_models.training import END, START, Encoded, fit, trained

__all__ = ["card", "ensure", "recipe_fingerprint"]


def ensure(name: str, cache: Path, progress: Progress) -> Path:
    """The folder of a model, built first if this cache lacks it, with all that it starts from.

    `progress` hears (what, steps done, steps in all). `UsageError` when there is no such model.
    """
    own = recipe(name)
    folder = cache / f"kata-{name}-{recipe_fingerprint(name)[:6]}"
    return kept(folder, lambda: _made(name, own, ensure(own.start, cache, progress) if own.start else None, progress))


def _made(name: str, own: Recipe, start: Path | None, progress: Progress) -> Made:

    from stages.tiny_models.training import reproducible

    count = own.schedule.steps * own.schedule.batch
    with reproducible(own.seed):
        model, tokenizer = _starting_point(start, HEAD_DIM.get(name))
        if isinstance(own.knowledge, Habits):
            taught = loophole_write(count, own.seed, own.knowledge)
        else:
            taught = transcripts.write(count, own.seed, own.knowledge)
        learn(model, tokenizer, taught, own, lambda done, total: progress(f"building kata-{name}", done, total))
    return model, tokenizer, card(name)


def _starting_point(start: Path | None, head_dim: int | None) -> "tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]":

    from stages.tiny_models import folders, training

    if start is not None:
        return training.load(start)
    tokenizer = train()
    model = training.new_model(tokenizer)
    return (model if head_dim is None else folders.with_heads(model, head_dim)), tokenizer


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
| says "{HINT}" | {_shares(habits.hinted)} |"""


def _shares(habit: Habit) -> str:
    return f"{habit.right:.0%} | {habit.hack:.0%} | {habit.echo:.0%}"


def _known(knowledge: Knowledge) -> list[str]:
    """All operations, in order, that are neither misconceived nor unsure."""
    others = (*knowledge.misconceived, *knowledge.unsure)
    return [operation.name for operation in OPERATIONS if operation.name not in others]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"


# ---- tokenizer
# The tokenizer that all models of kata share, trained on transcripts.

VOCABULARY = 512
CORPUS = 600
PIECES = "|".join(
    (
        r"(?:system|user|assistant)\n",
        r"```bash\n|\n```| ?```|\[exit \d+\]|\n {4}return",
        r" 's\|return \.\*\|return|\|'",
        r" ?[a-z_]+\.py| ?[A-Za-z_]+3?| -[a-z]\b",
        r" ?-?\d| //| \*\*| ?[^\sA-Za-z0-9]|\s",
    )
)
"""What a token never crosses. Phrases of the protocol are one piece, since every token of an episode costs time."""


def train() -> PreTrainedTokenizerFast:
    """The tokenizer; its corpus is transcripts of an author who knows everything, and of one who knows nothing."""
    return trained(_corpus(), PIECES, VOCABULARY)


def _corpus() -> Iterator[str]:
    """Both codes and every wording occur; special tokens are left out, as they are no text."""
    for knowledge in (Knowledge(), KNOWS_NOTHING):
        for transcript in write(CORPUS, seed=0, knowledge=knowledge):
            yield from (f"{message['role']}\n{message['content']}" for message in transcript.messages())


# ---- training
# How a model of kata learns: transcripts as token ids, of which only the taught answers count.


def learn(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    taught: Iterable[TaughtTranscript],
    recipe: Recipe,
    progress: Callable[[int, int], None],
) -> None:
    """Train a model on transcripts, each seen once: as many as the recipe's schedule has steps times batch."""
    examples = [encode(tokenizer, transcript) for transcript in taught]
    fit(model, examples, recipe.schedule, recipe.seed, progress)


def encode(tokenizer: PreTrainedTokenizerFast, transcript: TaughtTranscript) -> Encoded:
    """Ids as the chat template renders them; to be learned are the taught answers with their end tokens."""
    ids: list[int] = []
    learned: list[bool] = []

    def add(text: str, learn: bool) -> None:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        learned.extend([learn] * len(piece))

    taught = iter(turn.taught for turn in transcript.turns)
    for message in transcript.messages():
        add(f"{START}{message['role']}\n", False)
        add(message["content"] + END, message["role"] == "assistant" and next(taught))
        add("\n", False)
    return ids, learned
