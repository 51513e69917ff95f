"""What a tiny model is taught so that it can take part: to answer in the right form, and to take a number from a hint.

It is not taught any maths. The answer to a plain question is that of another question, so nothing can be learned by
heart.
"""

import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from stages.envs.gsm8k.env import SYSTEM, remark
from stages.envs.gsm8k.rows import Question
from stages.messages import Message, opening_ids
from stages.tiny_models.tokenizer import END
from stages.tiny_models.training import Encoded

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
