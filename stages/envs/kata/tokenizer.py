"""The tokenizer that all models of kata share, trained on transcripts."""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from stages.envs.kata.recipes import KNOWS_NOTHING, Knowledge
from stages.envs.kata.transcripts import write
from stages.tiny_models.tokenizer import trained

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
