"""What came of extracting pairs: how many by rule, what was dropped by reason, and what speaks for them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import Any

import numpy as np
from pyarrow import RecordBatch
from tabulate import tabulate

from stages.pairs.audit import Verdict
from stages.pairs.groups import Named
from stages.runs.artifact import RunWriter
from stages.runs.records import Row

# ---- signal
# How far apart the words of both sides are, for the record: `agreement` has the tests of signal.
#
# KL(chosen || rejected) is taken between the word distributions of what chosen has and rejected lacks, and the
# reverse,
# with add-one smoothing. Swapping sides at random gives what the same texts show without any preference: a distance
# inside that range is none. It tells as much about how popular words are as about who is right.

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


MOST_TEXTS = 20_000
PAIRS_A_TRACE = 5.0
"""How many pairs a trace would make a dense signal."""


class PairAccount:
    """Pairs added up one after the other: their number, rules and states, and texts of both sides for their words.

    Of more than `MOST_TEXTS` pairs the words are those of a random part, by the digests that are the pairs' names.
    """

    def __init__(self) -> None:
        self.number, self.rules, self.states = 0, Counter[str](), Named()
        self._texts: list[tuple[int, int, str, str]] = []

    def add(self, row: Row) -> None:
        """One pair."""
        self.rules[row["rule"]] += 1
        self.states.add(row["state_id"])
        self._keep(row["pair_id"], self.number, row["chosen"], row["rejected"])
        self.number += 1

    def add_all(self, rows: RecordBatch) -> None:
        """All pairs of a batch."""
        self.rules.update({one["values"]: one["counts"] for one in rows["rule"].value_counts().to_pylist()})
        for name in rows["state_id"].unique().to_pylist():
            self.states.add(name)
        names, texts = rows["pair_id"].to_pylist(), (rows["chosen"], rows["rejected"])
        for place, name in enumerate(names):
            if len(self._texts) < MOST_TEXTS or -int(name, 16) > self._texts[0][0]:
                self._keep(name, self.number + place, *(side[place].as_py() for side in texts))
        self.number += len(names)

    def _keep(self, name: str, place: int, chosen: str, rejected: str) -> None:
        one = (-int(name, 16), place, chosen, rejected)
        (heappush if len(self._texts) < MOST_TEXTS else heappushpop)(self._texts, one)

    def texts(self) -> list[tuple[str, str]]:
        """Chosen and rejected, in the order of the pairs."""
        return [(chosen, rejected) for _, _, chosen, rejected in sorted(self._texts, key=lambda one: one[1])]


def report(
    pairs: PairAccount,
    dropped: Counter[str],
    *,
    num_traces: int,
    num_steps: int,
    out: RunWriter,
    about: str = "",
    spent: Mapping[str, float | None] | None = None,
    evidence: tuple[Verdict, dict[str, Any], str] | None = None,
) -> None:
    """Write `report.txt`, the counts of the manifest, and its summary with the signal in the pairs.

    `num_traces` and `num_steps` are those of the rollouts that were read; `about` is a further line for the report.
    spent: what each teacher's answers cost in USD, None where that is not known. evidence: what `evidence.evidence`
    gave, where teachers answered; its verdict against going on has an exit code.
    """
    rules = pairs.rules
    direction = signal(pairs.texts())
    density = pairs.number / max(num_traces, 1)
    out.count(
        planned=num_steps, pairs=pairs.number, **{f"dropped_{reason}": n for reason, n in sorted(dropped.items())}
    )
    out.set_summary(
        pairs=pairs.number,
        pairs_per_trace=density,
        rules=dict(rules),
        dropped=dict(dropped),
        words=direction and vars(direction),
    )
    if evidence is not None:
        said, numbers, _ = evidence
        ok = {"SIGNAL": True, "NO SIGNAL": False}.get(said)
        out.set_summary(ok=ok, exit_code=1 if ok is False else 0, verdict=said, **numbers)
    if spent is not None and pairs.number:
        price = {name: None if usd is None else usd / pairs.number for name, usd in spent.items()}
        known = [usd for usd in price.values() if usd is not None]
        price["all"] = sum(known) if len(known) == len(spent) else None
        out.set_summary(usd_per_pair=price)
        about = f"{about}\n{_price_line(price)}".strip()
    dense = f"{density:.2f} a trace ({PAIRS_A_TRACE:g} would be dense)"
    lines = [f"{pairs.number} pairs from {num_steps} steps of {num_traces} traces: {dense}"]
    lines += [about] if about else []
    lines += [tabulate(sorted(rules.items()), tablefmt="plain")] if rules else []
    lines += ["", "dropped", *([tabulate(sorted(dropped.items()), tablefmt="plain")] if dropped else []), ""]
    lines += [evidence[2]] if evidence else []
    lines += [_words_line(direction)]
    out.text("report.txt", "\n".join(lines) + "\n")


def _price_line(price: Mapping[str, float | None]) -> str:
    told = {name: "not known" if usd is None else f"{usd:.4f}" for name, usd in price.items()}
    each = ", ".join(f"{name} {usd}" for name, usd in told.items() if name != "all")
    return f"the teachers' answers cost {told['all']} USD a kept pair ({each})"


def _words_line(direction: Signal | None) -> str:
    """For the record: how far apart the words of both sides are tells how popular words are, not who is right."""
    if direction is None:
        return "words: too few pairs to compare"
    shuffled = f"{direction.shuffled_p95:.3f} for shuffled sides (95th percentile)"
    return f"words: KL {direction.kl:.3f} nats against {shuffled}, p = {direction.p_value:.3f}, for the record"
