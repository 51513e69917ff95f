"""How far apart the words of both sides are, for the record: `agreement` has the tests of signal.

KL(chosen || rejected) is taken between the word distributions of what chosen has and rejected lacks, and the reverse,
with add-one smoothing. Swapping sides at random gives what the same texts show without any preference: a distance
inside that range is none. It tells as much about how popular words are as about who is right.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHUFFLES = 500


@dataclass(frozen=True)
class Signal:
    """KL in nats, the 95th percentile of shuffled pairs, and the permutation p-value (with the +1 of a valid test)."""

    kl: float
    shuffled_p95: float
    p_value: float


def signal(pairs: Sequence[tuple[str, str]], seed: int = 0) -> Signal | None:
    """The signal in (chosen, rejected) texts; None when there are fewer than five pairs to judge by."""
    if len(pairs) < 5:
        return None
    words = _words(pairs)
    random = np.random.default_rng(seed)
    observed = _kl(*_sides(words, np.zeros(len(pairs), dtype=np.int64)))
    shuffled = np.array([_kl(*_sides(words, random.integers(0, 2, size=len(pairs)))) for _ in range(SHUFFLES)])
    p_value = (1 + int((shuffled >= observed - 1e-12).sum())) / (SHUFFLES + 1)
    return Signal(observed, float(np.quantile(shuffled, 0.95)), p_value)


@dataclass(frozen=True)
class Words:
    """Words that one side of a pair has and the other lacks: arrays [N], one entry for each pair, side and word."""

    pair: np.ndarray
    side: np.ndarray
    word: np.ndarray
    number: np.ndarray
    vocabulary: int


def _words(pairs: Sequence[tuple[str, str]]) -> Words:
    bags = [(Counter(chosen.split()), Counter(rejected.split())) for chosen, rejected in pairs]
    only = [(chosen - rejected, rejected - chosen) for chosen, rejected in bags]
    known = {word: i for i, word in enumerate(sorted({w for sides in only for side in sides for w in side}))}
    entries = [
        (p, s, known[w], n) for p, sides in enumerate(only) for s, side in enumerate(sides) for w, n in side.items()
    ]
    pair, side, word, number = np.array(entries, dtype=np.int64).reshape(-1, 4).T
    return Words(pair, side, word, number, vocabulary=max(len(known), 1))


def _sides(words: Words, sign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts [W] of both sides, with those of pairs whose sign is 1 swapped."""
    side = words.side ^ sign[words.pair]
    chosen, rejected = (
        np.bincount(words.word, weights=words.number * (side == s), minlength=words.vocabulary) for s in (0, 1)
    )
    return chosen, rejected


def _kl(chosen: np.ndarray, rejected: np.ndarray) -> float:
    p, q = (chosen + 1) / (chosen + 1).sum(), (rejected + 1) / (rejected + 1).sum()
    return float((p * np.log(p / q)).sum())
