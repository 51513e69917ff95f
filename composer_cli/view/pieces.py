"""The tokens of an answer with their log-probs, as text where the model's tokenizer lies on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from stages.runs.artifact import Run
from stages.runs.outcome_records import CHECKPOINT
from stages.runs.records import Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEVELS = (-0.05, -0.3, -1.0, -2.0, -4.0)
"""Natural logs of probabilities at which the colour changes: 95 %, 74 %, 37 %, 14 %, 2 %."""
UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """Some text, its log-prob (the sum where several tokens make one character), and its level, 0 for the surest."""

    text: str
    logprob: float
    level: int


def pieces(row: Row, tokenizer: "Tokenizer | None") -> list[Piece]:
    """The tokens of a step's answer; without a tokenizer they are shown by their ids. Empty without log-probs."""
    ids, logprobs = row.get("completion_token_ids"), row.get("logprobs")
    if not ids or not logprobs or len(ids) != len(logprobs):
        return []
    if tokenizer is None:
        return [_piece(f"{token} ", value) for token, value in zip(ids, logprobs, strict=True)]
    found, held, total = list[Piece](), list[int](), 0.0
    for token, value in zip(ids, logprobs, strict=True):
        held.append(token)
        total += value
        text = tokenizer.decode(held, skip_special_tokens=False)
        if not text.endswith(UNFINISHED):
            found.append(_piece(text, total))
            held, total = [], 0.0
    return [*found, _piece(tokenizer.decode(held, skip_special_tokens=False), total)] if held else found


def _piece(text: str, logprob: float) -> Piece:
    return Piece(text, logprob, level(logprob))


def level(logprob: float) -> int:
    """0 for what was nearly certain, 5 for what was nearly impossible."""
    return sum(logprob < edge for edge in LEVELS)


def of_run(run: Run, root: Path) -> "Tokenizer | None":
    """The tokenizer of the policy that played a run; None where it is not on this machine."""
    for place in _places(run, root):
        if (place / "tokenizer.json").is_file():
            return _opened(str(place / "tokenizer.json"))
    return None


@lru_cache(4)
def _opened(path: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def _places(run: Run, root: Path) -> Sequence[Path]:
    """Where a model may lie: a folder of its name, this run's checkpoint, the kept models, the hub's cache."""
    models = [str(about.get("model", "")) for about in run.manifest.models.values() if isinstance(about, dict)]
    name = next((model for model in models if model), "")
    environment, colon, short = name.partition(":")
    kept = sorted((root / "models").glob(f"{environment}-{short}-*")) if colon and "/" not in short else []
    own = [run.folder(CHECKPOINT)] if run.holds(CHECKPOINT) else []
    return [*([Path(name)] if name and not colon else []), *own, *reversed(kept), *_cached(name)]


def _cached(name: str) -> list[Path]:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return []
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json")
    return [Path(found).parent] if isinstance(found, str) else []
