"""Report the result of an extraction: how many pairs by rule, what was dropped by reason, and the evidence for them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Any

import numpy as np
from pyarrow import RecordBatch
from tabulate import tabulate

from stages.pairs.agreement import SignalVerdict
from stages.pairs.groups import NamedStates
from stages.runs.artifact import RunWriter
from stages.runs.records import Row

SHUFFLES = 500
MOST_TEXTS = 20_000
DENSE_PAIRS_PER_TRACE = 5.0
"""Pairs per trace that would make a dense signal."""


@dataclass(frozen=True)
class WordSignal:
    """KL in nats, the 95th percentile of shuffled pairs, and the permutation p-value (with the +1 of a valid test)."""

    kl: float
    shuffled_p95: float
    p_value: float


def word_signal(pairs: Sequence[tuple[str, str]], seed: int = 0) -> WordSignal | None:
    """Return how far apart the words of (chosen, rejected) texts are; None with fewer than five pairs.

    KL(chosen || rejected) between the word distributions of what chosen has and rejected lacks, and the reverse, with
    add-one smoothing. Swapping sides at random gives what the same texts show without any preference: a distance within
    that range is none. It depends as much on how popular words are as on who is right: `agreement` has the tests of
    signal, this is for the record.
    """
    if len(pairs) < 5:
        return None
    bags = [(Counter(chosen.split()), Counter(rejected.split())) for chosen, rejected in pairs]
    only = [(chosen - rejected, rejected - chosen) for chosen, rejected in bags]
    known = {word: i for i, word in enumerate(sorted({w for sides in only for side in sides for w in side}))}
    entries = [
        (p, s, known[w], n) for p, sides in enumerate(only) for s, side in enumerate(sides) for w, n in side.items()
    ]
    # [N]: one entry for each pair, side and word that the other side lacks
    pair, side, word, number = np.array(entries, dtype=np.int64).reshape(-1, 4).T

    def kl(swapped: np.ndarray) -> float:
        side_of = side ^ swapped[pair]
        chosen, rejected = (
            np.bincount(word, weights=number * (side_of == s), minlength=max(len(known), 1)) for s in (0, 1)
        )
        # One is added to every count, so that a word of one side alone does not make the divergence infinite.
        p, q = (chosen + 1) / (chosen + 1).sum(), (rejected + 1) / (rejected + 1).sum()
        return float((p * np.log(p / q)).sum())

    random = np.random.default_rng(seed)
    observed = kl(np.zeros(len(pairs), dtype=np.int64))
    shuffled = np.array([kl(random.integers(0, 2, size=len(pairs))) for _ in range(SHUFFLES)])
    p_value = (1 + int((shuffled >= observed - 1e-12).sum())) / (SHUFFLES + 1)
    return WordSignal(observed, float(np.quantile(shuffled, 0.95)), p_value)


@dataclass(eq=False)
class PairAccount:
    """Pairs added up one after the other: their number, rules and states, and texts of both sides for their words.

    Of more than `MOST_TEXTS` pairs the words are those of a random part, by the digests that are the pairs' names.
    """

    number: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    states: NamedStates = field(default_factory=NamedStates)
    _texts: list[tuple[int, int, str, str]] = field(default_factory=list, init=False)
    """A heap of (minus the digest, place, chosen, rejected): its first entry is the next to give way."""

    def add(self, row: Row) -> None:
        """Add one pair."""
        self.rules[row["rule"]] += 1
        self.states.add(row["state_id"])
        self._add_texts(row["pair_id"], self.number, row["chosen"], row["rejected"])
        self.number += 1

    def add_all(self, rows: RecordBatch) -> None:
        """Add all pairs of a batch."""
        self.rules.update({one["values"]: one["counts"] for one in rows["rule"].value_counts().to_pylist()})
        for name in rows["state_id"].unique().to_pylist():
            self.states.add(name)
        names, texts = rows["pair_id"].to_pylist(), (rows["chosen"], rows["rejected"])
        # Texts become Python strings only where they are kept: most pairs of a large run are not.
        for place, name in enumerate(names):
            if len(self._texts) < MOST_TEXTS or -int(name, 16) > self._texts[0][0]:
                self._add_texts(name, self.number + place, *(side[place].as_py() for side in texts))
        self.number += len(names)

    def _add_texts(self, name: str, place: int, chosen: str, rejected: str) -> None:
        one = (-int(name, 16), place, chosen, rejected)
        (heappush if len(self._texts) < MOST_TEXTS else heappushpop)(self._texts, one)

    def texts(self) -> list[tuple[str, str]]:
        """Return the kept (chosen, rejected) texts, in the order of the pairs."""
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
    evidence: tuple[SignalVerdict, dict[str, Any], str] | None = None,
) -> None:
    """Write `report.txt`, the counts of the manifest, and its summary with the word signal of the pairs.

    `num_traces` and `num_steps` are those of the rollouts that were read; `about` is a further line for the report.
    spent: the cost of each teacher's answers in USD, None where not known. evidence: that of `PairEvidence.verdict`,
    where teachers answered; a verdict of NO SIGNAL has an exit code.
    """
    rules = pairs.rules
    words = word_signal(pairs.texts())
    density = pairs.number / max(num_traces, 1)
    out.count(
        planned=num_steps, pairs=pairs.number, **{f"dropped_{reason}": n for reason, n in sorted(dropped.items())}
    )
    out.set_summary(
        pairs=pairs.number,
        pairs_per_trace=density,
        rules=dict(rules),
        dropped=dict(dropped),
        words=words and vars(words),
    )
    if evidence is not None:
        verdict, numbers, _ = evidence
        ok = {"SIGNAL": True, "NO SIGNAL": False}.get(verdict)
        out.set_summary(ok=ok, exit_code=1 if ok is False else 0, verdict=verdict, **numbers)
    if spent is not None and pairs.number:
        price = {name: None if usd is None else usd / pairs.number for name, usd in spent.items()}
        known = [usd for usd in price.values() if usd is not None]
        price["all"] = sum(known) if len(known) == len(spent) else None
        out.set_summary(usd_per_pair=price)
        shown = {name: "not known" if usd is None else f"{usd:.4f}" for name, usd in price.items()}
        each = ", ".join(f"{name} {usd}" for name, usd in shown.items() if name != "all")
        about = f"{about}\nthe teachers' answers cost {shown['all']} USD a kept pair ({each})".strip()
    dense = f"{density:.2f} a trace ({DENSE_PAIRS_PER_TRACE:g} would be dense)"
    lines = [f"{pairs.number} pairs from {num_steps} steps of {num_traces} traces: {dense}"]
    lines += [about] if about else []
    lines += [tabulate(sorted(rules.items()), tablefmt="plain")] if rules else []
    lines += ["", "dropped", *([tabulate(sorted(dropped.items()), tablefmt="plain")] if dropped else []), ""]
    lines += [evidence[2]] if evidence else []
    if words is None:
        lines += ["words: too few pairs to compare"]
    else:
        shuffled = f"{words.shuffled_p95:.3f} for shuffled sides (95th percentile)"
        lines += [f"words: KL {words.kl:.3f} nats against {shuffled}, p = {words.p_value:.3f}, for the record"]
    out.write_file("report.txt", "\n".join(lines) + "\n")
