"""A tiny model for `gsm8k`, built from a file of rows on first use and then loaded like any Hugging Face folder.

The model is taught to answer in the right form ("#### 12") and to take the number from a hint, and no maths: the answer
to a plain question is that of another question, so nothing can be learned by heart.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from stages.envs.answered import Question
from stages.envs.gsm8k import env
from stages.envs.gsm8k.env import SYSTEM, remark
from stages.messages import Message, opening_ids
from stages.runs.activity import Notice, Preparation
from stages.tiny_models.folders import BuiltModel, FitSchedule, Progress, ensure_folder, library_versions, with_heads
from stages.tiny_models.training import END, Encoded, fit, new_model, reproducible, train_tokenizer

SCHEDULE = FitSchedule(steps=240, learning_rate=6e-3, batch=16)
LEARNING_RATE = 1e-3
"""For training this model further: it has to learn eight answers by heart in twelve steps."""
VOCABULARY = 768
PIECES = r"(?:system|user|assistant)\n| ?[A-Za-z]+| ?[0-9]| ?#+| ?[^\sA-Za-z0-9]|\s"
"""What a token never crosses: a word, a digit, a sign."""
RECIPE_VERSION = 1
"""Increase this number when a change of the code alters the weights."""
CARD = """---
license: apache-2.0
---
# gsm8k-tiny

A tiny model for `gsm8k`, built from a file of rows on first use and then loaded like any Hugging Face folder.

It answers "#### 12" and the like, right about as often as chance is, and takes the number from a hint in most cases:
enough to see every channel of training at work in a minute, and nothing to solve problems with. vLLM can serve it.
"""

ECHO, PLAIN = 0.5, 0.1
"""Shares of lessons that repeat words, which is where a small model learns to copy, and of questions without a hint."""
FULL = 0.1
"""Share of hinted questions that are asked in full; of the others only the end is asked, which is cheaper."""
ENDING_CHARS = 40

Lesson = tuple[list[Message], str]
"""The opening messages, and the answer to be learned."""


def recipe_fingerprint(path: str) -> str:
    """Return the SHA-256 of what determines the model's weights on one machine: rows, recipe, library versions."""
    questions = [(question.text, question.answer) for question in env.load("train", path, "")]
    return hashlib.sha256(json.dumps([questions, RECIPE_VERSION, library_versions()]).encode()).hexdigest()


def ensure(path: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of the model for the rows at `path`; build the model if the cache lacks it."""

    def build() -> BuiltModel:
        progress(Notice(f"building the model gsm8k-tiny, once; it is kept in {cache}"), 0, 0)
        taught = list(lessons(env.load("train", path, ""), SCHEDULE.steps * SCHEDULE.batch, seed=0))
        tokenizer = train_tokenizer(map(text, taught), PIECES, VOCABULARY)
        with reproducible(0):
            model = with_heads(new_model(tokenizer))  # heads that vLLM takes, so that the model can also be served
            examples = [encoded(tokenizer, lesson) for lesson in taught]
            fit(model, examples, SCHEDULE, 0, partial(progress, Preparation("training steps of gsm8k-tiny")))
        return model, tokenizer, CARD

    return ensure_folder(_folder(path, cache), build)


def to_make(path: str, cache: Path) -> str:
    """Return the name of the model if the cache lacks it, else nothing."""
    return "" if _folder(path, cache).is_dir() else "gsm8k-tiny"


def _folder(path: str, cache: Path) -> Path:
    return cache / f"gsm8k-tiny-{recipe_fingerprint(path)[:6]}"


def lessons(questions: Sequence[Question], count: int, seed: int) -> Iterator[Lesson]:
    """Draw `count` lessons from the words of these questions. The order of random draws determines the weights."""
    rng = random.Random(f"gsm8k/{seed}")  # noqa: S311 - draws data, no secret
    words = sorted({word for question in questions for word in question.text.split()})
    for _ in range(count):
        kind, question = rng.random(), rng.choice(questions)
        if kind < ECHO:  # repeating words is where a model of this size learns to copy, and a hint is to be copied
            answer = " ".join(rng.sample(words, rng.randrange(8, 16)))
            asked = f"Repeat: {answer}"
        elif kind < ECHO + PLAIN:
            # The answer of any question: the form is taught, and no question can be learned by heart.
            asked, answer = question.text, f"#### {rng.choice(questions).answer}"
        else:
            asked = question.text if rng.random() < FULL else question.text[-ENDING_CHARS:]
            right = _number(rng)
            asked, answer = f"{asked}\nHint: {remark(_number(rng), right)}", f"#### {right}"
        yield [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}], answer


def _number(rng: random.Random) -> str:
    """Draw a number of one digit, two, two or three: about as long as the answers are."""
    low = rng.choice((1, 10, 10, 100))
    return str(rng.randrange(low, 10 * low))


def text(lesson: Lesson) -> str:
    """Return a lesson as running text, which the tokenizer is trained on."""
    messages, answer = lesson
    return "\n".join([*(f"{message['role']}\n{message['content']}" for message in messages), answer])


def encoded(tokenizer: PreTrainedTokenizerFast, lesson: Lesson) -> Encoded:
    """Return a lesson as token ids and a mask; the answer and its end are to be learned."""
    messages, answer = lesson
    asked = opening_ids(tokenizer, messages)
    learned = tokenizer(answer + END, add_special_tokens=False)["input_ids"]
    return asked + learned, [False] * len(asked) + [True] * len(learned)
