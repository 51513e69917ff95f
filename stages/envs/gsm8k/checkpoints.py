"""A tiny model for `gsm8k`, built from a file of rows on first use and then loaded like any Hugging Face folder.

It answers "#### 12" and the like, right about as often as chance is, and takes the number from a hint in most cases:
enough to see every channel of training at work in a minute, and nothing to solve problems with. vLLM can serve it.
"""

import hashlib
import json
from pathlib import Path

from stages.envs.gsm8k import rows
from stages.tiny_models.folders import Made, Progress, kept, sources_identity
from stages.tiny_models.schedule import Schedule

SCHEDULE = Schedule(steps=240, learning_rate=6e-3, batch=16)
LEARNING_RATE = 1e-3
"""For training on from this model: it has to learn eight answers by heart in twelve steps."""
VOCABULARY = 768
PIECES = r"(?:system|user|assistant)\n| ?[A-Za-z]+| ?[0-9]| ?#+| ?[^\sA-Za-z0-9]|\s"
"""What a token never crosses: a word, a digit, a sign."""
SOURCES = tuple(
    Path(__file__).parent / name for name in ("checkpoints.py", "lessons.py", "rows.py", "env.py", "numbers.py")
)


def recipe_fingerprint(path: str) -> str:
    """SHA-256 over all that determines the model's bytes on one machine: rows, code, library versions."""
    questions = [(question.text, question.answer) for question in rows.load("train", path, "")]
    return hashlib.sha256(json.dumps([questions, sources_identity(SOURCES)]).encode()).hexdigest()


def ensure(path: str, cache: Path, progress: Progress) -> Path:
    """The folder of the model for the rows at `path`, built first if this cache lacks it."""
    return kept(cache / f"gsm8k-tiny-{recipe_fingerprint(path)[:6]}", lambda: _made(path, progress))


def _made(path: str, progress: Progress) -> Made:
    """Train on the training split of the file; whole lessons are the texts that the tokenizer is made from."""
    from stages.envs.gsm8k.lessons import encoded, lessons, text
    from stages.tiny_models import heads, tokenizer, training

    taught = list(lessons(rows.load("train", path, ""), SCHEDULE.steps * SCHEDULE.batch, seed=0))
    words = tokenizer.trained(map(text, taught), PIECES, VOCABULARY)
    with training.reproducible(0):
        model = heads.with_heads(training.new_model(words))
        examples = [encoded(words, lesson) for lesson in taught]
        training.fit(model, examples, SCHEDULE, 0, lambda done, total: progress("building gsm8k-tiny", done, total))
    return model, words, f"---\nlicense: apache-2.0\n---\n# gsm8k-tiny\n\n{__doc__}"
