"""A tiny model for `gsm8k`, built from a file of rows on first use and then loaded like any Hugging Face folder.

It answers "#### 12" and the like, right about as often as chance is, and takes the number from a hint in most cases:
enough to see every channel of training at work in a minute, and nothing to solve problems with. vLLM can serve it.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from stages.envs.gsm8k import env
from stages.envs.gsm8k.env import SYSTEM, Question, remark
from stages.messages import Message, opening_ids
from stages.tiny_models.folders import Made, Progress, Schedule, kept, library_versions
from stages.tiny_models.training import END, Encoded

SCHEDULE = Schedule(steps=240, learning_rate=6e-3, batch=16)
LEARNING_RATE = 1e-3
"""For training on from this model: it has to learn eight answers by heart in twelve steps."""
VOCABULARY = 768
PIECES = r"(?:system|user|assistant)\n| ?[A-Za-z]+| ?[0-9]| ?#+| ?[^\sA-Za-z0-9]|\s"
"""What a token never crosses: a word, a digit, a sign."""
RECIPE_VERSION = 1
"""Raise this number when a change of the code alters the weights."""


def recipe_fingerprint(path: str) -> str:
    """Return the SHA-256 of what determines the model's weights on one machine: rows, recipe, library versions."""
    questions = [(question.text, question.answer) for question in env.load("train", path, "")]
    return hashlib.sha256(json.dumps([questions, RECIPE_VERSION, library_versions()]).encode()).hexdigest()


def ensure(path: str, cache: Path, progress: Progress) -> Path:
    """The folder of the model for the rows at `path`, built first if this cache lacks it."""
    return kept(cache / f"gsm8k-tiny-{recipe_fingerprint(path)[:6]}", lambda: _made(path, progress))


def _made(path: str, progress: Progress) -> Made:
    """Train on the training split of the file; whole lessons are the texts that the tokenizer is made from."""
    from stages.tiny_models import folders, training
    from stages.tiny_models.training import trained

    taught = list(lessons(env.load("train", path, ""), SCHEDULE.steps * SCHEDULE.batch, seed=0))
    words = trained(map(text, taught), PIECES, VOCABULARY)
    with training.reproducible(0):
        model = folders.with_heads(training.new_model(words))
        examples = [encoded(words, lesson) for lesson in taught]
        training.fit(model, examples, SCHEDULE, 0, lambda done, total: progress("building gsm8k-tiny", done, total))
    return model, words, f"---\nlicense: apache-2.0\n---\n# gsm8k-tiny\n\n{__doc__}"


# ---- lessons
# What a tiny model is taught so that it can take part: to answer in the right form, and to take a number from a hint.
#
# It is not taught any maths. The answer to a plain question is that of another question, so nothing can be learned by
# heart.

Lesson = tuple[list[Message], str]
"""The opening messages, and the answer to be learned."""

ECHO, PLAIN = 0.5, 0.1
"""Shares of lessons that repeat words, which is where a small model learns to copy, and of questions without a hint."""
WHOLE = 0.1
"""Share of hinted questions that are asked in full; of the others only the end is, which is cheaper."""
ENDING_CHARS = 40


def lessons(questions: Sequence[Question], count: int, seed: int) -> Iterator[Lesson]:
    """`count` lessons from the words of these questions."""
    rng = random.Random(f"gsm8k/{seed}")  # noqa: S311 - draws data, no secret
    words = sorted({word for question in questions for word in question.text.split()})
    for _ in range(count):
        kind, question = rng.random(), rng.choice(questions)
        if kind < ECHO:
            yield _echo(rng, words)
        elif kind < ECHO + PLAIN:
            yield _asked(question.text, rng.choice(questions).answer)
        else:
            yield _hinted(rng, question)


def _echo(rng: random.Random, words: Sequence[str]) -> Lesson:
    text = " ".join(rng.sample(words, rng.randrange(8, 16)))
    return _opening(f"Repeat: {text}"), text


def _asked(text: str, answer: str) -> Lesson:
    return _opening(text), f"#### {answer}"


def _opening(text: str) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def _hinted(rng: random.Random, question: Question) -> Lesson:
    text = question.text if rng.random() < WHOLE else question.text[-ENDING_CHARS:]
    right = _number(rng)
    return _asked(f"{text}\nHint: {remark(_number(rng), right)}", right)


def _number(rng: random.Random) -> str:
    """One digit, two, two or three: about as long as the answers are."""
    low = rng.choice((1, 10, 10, 100))
    return str(rng.randrange(low, 10 * low))


def text(lesson: Lesson) -> str:
    """A lesson as running text."""
    messages, answer = lesson
    return "\n".join([*(f"{message['role']}\n{message['content']}" for message in messages), answer])


def encoded(words: PreTrainedTokenizerFast, lesson: Lesson) -> Encoded:
    """A lesson as token ids; the answer and its end are to be learned."""
    messages, answer = lesson
    asked = opening_ids(words, messages)
    learned = words(answer + END, add_special_tokens=False)["input_ids"]
    return asked + learned, [False] * len(asked) + [True] * len(learned)
