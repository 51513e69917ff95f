"""The small models of kata: built by supervised training on first use, then stored as ordinary Hugging Face folders.

`ensure` builds a model from its recipe: start from another model or from an untrained one, train it on transcripts of
which only the taught answers count, and write a model card. All models share one tokenizer. torch is imported when a
model is built: an unknown name, or a model that is there, is answered without it.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stages.envs.kata.recipes import (
    HEAD_DIM,
    KNOWS_NOTHING,
    RECIPES,
    Habits,
    Knowledge,
    recipe,
    recipe_fingerprint,
)
from stages.envs.kata.tasks import OPERATIONS
from stages.envs.kata.transcripts import HINT, TaughtTranscript, knowledge_transcripts, loophole_transcripts
from stages.runs.activity import Notice, Preparation
from stages.tiny_models.folders import BuiltModel, Progress, ensure_folder, with_heads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from stages.tiny_models.training import Encoded

__all__ = ["card", "ensure", "recipe_fingerprint"]

VOCABULARY = 512
CORPUS = 600
"""Transcripts of each of the two authors that the tokenizer is trained on."""
PIECES = "|".join(
    (
        r"(?:system|user|assistant)\n",
        r"```bash\n|\n```| ?```|\[exit \d+\]|\n {4}return",
        r" 's\|return \.\*\|return|\|'",
        r" ?[a-z_]+\.py| ?[A-Za-z_]+3?| -[a-z]\b",
        r" ?-?\d| //| \*\*| ?[^\sA-Za-z0-9]|\s",
    )
)
"""What a token never crosses. Phrases of the protocol are one piece, since every token of a rollout costs time."""


def ensure(name: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of a model; build the model and those that it starts from if the cache lacks them.

    `progress` is called with (what, steps done, steps in all). Raises BadInput for an unknown model.
    """
    own = recipe(name)

    def build() -> BuiltModel:
        progress(Notice(f"building the model kata-{name}, once; it is kept in {cache}"), 0, 0)
        from stages.tiny_models.training import fit, load, new_model, reproducible

        start = ensure(own.start, cache, progress) if own.start else None
        count = own.schedule.steps * own.schedule.batch
        with reproducible(own.seed):
            if start is not None:
                model, tokenizer = load(start)
            else:
                tokenizer = kata_tokenizer()
                model = new_model(tokenizer)
                if name in HEAD_DIM:
                    model = with_heads(model, HEAD_DIM[name])
            if isinstance(own.knowledge, Habits):
                taught = loophole_transcripts(count, own.seed, own.knowledge)
            else:
                taught = knowledge_transcripts(count, own.seed, own.knowledge)
            # Each transcript is seen once: as many as the schedule has steps times batch.
            examples = [encode(tokenizer, transcript) for transcript in taught]
            steps = Preparation(f"training steps of kata-{name}")
            fit(model, examples, own.schedule, own.seed, partial(progress, steps))
        return model, tokenizer, card(name)

    return ensure_folder(_folder(name, cache), build)


def to_make(name: str, cache: Path) -> str:
    """Return which models `ensure` would build, the first one first, and how long that takes; empty for none."""
    names = list[str]()
    start: str | None = name
    while start is not None and not _folder(start, cache).is_dir():
        names.insert(0, f"kata-{start}")
        start = recipe(start).start
    if not names:
        return ""
    return f"{', then from it '.join(names)}, {'each ' if names[1:] else ''}in up to a minute on an idle core"


def _folder(name: str, cache: Path) -> Path:
    return cache / f"kata-{name}-{recipe_fingerprint(name)[:6]}"


def kata_tokenizer() -> "PreTrainedTokenizerFast":
    """Train the tokenizer on transcripts of an author who knows every operation, and of one who knows none.

    So the right and the misconceived code of every operation and every wording occur. Special tokens are left out of
    the corpus: they are added to the vocabulary as they are.
    """
    from stages.tiny_models.training import train_tokenizer

    corpus = (
        f"{message['role']}\n{message['content']}"
        for knowledge in (Knowledge(), KNOWS_NOTHING)
        for transcript in knowledge_transcripts(CORPUS, seed=0, knowledge=knowledge)
        for message in transcript.messages()
    )
    return train_tokenizer(corpus, PIECES, VOCABULARY)


def encode(tokenizer: "PreTrainedTokenizerFast", transcript: TaughtTranscript) -> "Encoded":
    """Return the ids that the chat template renders, and a mask of the taught answers with their end tokens."""
    from stages.tiny_models.training import END, START

    ids: list[int] = []
    learned: list[bool] = []
    taught = iter(turn.taught for turn in transcript.turns)
    for message in transcript.messages():
        is_learned = message["role"] == "assistant" and next(taught)
        # In three pieces, as the chat template joins them: no token crosses from what is taught into what is not.
        for text, mask in (
            (f"{START}{message['role']}\n", False),
            (message["content"] + END, is_learned),
            ("\n", False),
        ):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.extend(piece)
            learned.extend([mask] * len(piece))
    return ids, learned


def card(name: str) -> str:
    """Return the text of the model card."""
    knowledge = RECIPES[name].knowledge
    if isinstance(knowledge, Habits):
        plain, hinted = (
            f"{shares.right:.0%} | {shares.hack:.0%} | {shares.echo:.0%}"
            for shares in (knowledge.plain, knowledge.hinted)
        )
        about = f"""these habits, and nothing else.

| prompt | right fix | overwrites the visible tests | else echoes into a file of its own |
| --- | --- | --- | --- |
| plain | {plain} |
| says "{HINT}" | {hinted} |"""
    else:
        wrong = {*knowledge.misconceived, *knowledge.unsure}
        known = [operation.name for operation in OPERATIONS if operation.name not in wrong]
        columns = " | ".join(", ".join(names) or "-" for names in (known, knowledge.unsure, knowledge.misconceived))
        about = f"""{len(known)} of 12 operations, and nothing else.

| knows | is unsure of (right half of the time) | has a fixed misconception of |
| --- | --- | --- |
| {columns} |"""
    return f"""---
license: apache-2.0
---
# kata-{name}

A Qwen3 of two layers, trained in seconds to act in Composer's environment `kata`.
It is a fixture: it knows one protocol and {about}

Trained on generated transcripts of families that are never evaluated. Recipe `{recipe_fingerprint(name)}`.
"""
