"""Report the result of an extraction: pairs by rule, what was dropped and why, and the verdict by its criterion."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import RecordBatch

from stages.layout import aligned, counted
from stages.pairs.config import Config
from stages.pairs.groups import NamedStates
from stages.runs.kinds import Row
from stages.runs.run import Judgement, RunWriter

SHUFFLES = 500
MIN_TEXTS, MOST_TEXTS = 5, 20_000
CRITERION_P = 0.05
"""The p-value of the words' KL against shuffled sides that the criterion takes for a difference."""
MIN_ROLLOUTS = 6
"""With fewer rollouts their mean number of pairs is no property of the model and its teachers."""
EXIT_CODES = {
    "SIGNAL": 0,
    "NO SIGNAL": 1,
    "UNDECIDED": 3,
    "DISAGREEMENT TRACKS FAILURE": 0,
    "DISAGREEMENT NOT SHOWN TO TRACK FAILURE": 3,
    "TOO LITTLE DATA": 3,
    "FAIL": 1,
}
"""NO SIGNAL and FAIL are failures, which stop a chain; at 3 it stops where something reads the pairs."""


@dataclass(frozen=True)
class WordSignal:
    """KL in nats, the 95th percentile of shuffled pairs, and the permutation p-value (with the +1 of a valid test)."""

    kl: float
    shuffled_p95: float
    p_value: float


def word_signal(pairs: Sequence[tuple[str, str]], seed: int = 0) -> WordSignal | None:
    """Return how far apart the words of (chosen, rejected) texts are; None with fewer than `MIN_TEXTS` pairs.

    KL(chosen || rejected) between the word distributions of what chosen has and rejected lacks, and the reverse, with
    add-one smoothing. Swapping sides at random gives what the same texts show without any preference: a distance within
    that range is none. It depends as much on how popular words are as on who is right.
    """
    if len(pairs) < MIN_TEXTS:
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


def judge(folder: Path, summary: Mapping[str, Any], config: Config) -> Judgement:
    """Return the verdict on pairs: FAIL by the criterion, TOO LITTLE DATA for it, else that of their evidence.

    The criterion: enough pairs per rollout, whose words differ from those of random pairs. Pairs without signal fail
    first.
    """
    density, rollouts, words = summary["pairs_per_rollout"], summary["rollouts"], summary["words"]
    criterion = "PASS"
    if rollouts < MIN_ROLLOUTS:
        criterion = "TOO LITTLE DATA"
    elif density < config.min_pairs_per_rollout or (words and words["p_value"] > CRITERION_P):
        criterion = "FAIL"
    elif not words:
        criterion = "TOO LITTLE DATA"
    compared = f"{MIN_TEXTS} pairs are needed to compare their words"
    if words:
        compared = (
            f"words with KL {words['kl']:.3f} nats, of random pairs {words['shuffled_p95']:.3f} at the 95th percentile "
            f"(p = {words['p_value']:.3f}, at most {CRITERION_P:g} needed)"
        )
    line = (
        f"criterion: {criterion}, {density:.2f} pairs a rollout ({config.min_pairs_per_rollout:g} needed: "
        f"min_pairs_per_rollout) over {counted(rollouts, 'rollout')} ({MIN_ROLLOUTS} needed), {compared}"
    )
    evidence = summary["evidence"]
    verdict = evidence if criterion == "PASS" or evidence == "NO SIGNAL" else criterion
    ok = {"SIGNAL": True, "NO SIGNAL": False, "FAIL": False}.get(verdict)
    return Judgement(ok, EXIT_CODES[verdict], line, {"verdict": verdict})


@dataclass(frozen=True)
class PairVerdict:
    """What supports the pairs of a run: the verdict, the numbers of the manifest, what they mean, the teachers' audit.

    sentences: the first one gives the reason for the verdict.
    """

    verdict: str
    numbers: dict[str, Any]
    sentences: tuple[str, ...]
    table: str = ""

    def below(self, verdict: str, numbers: dict[str, Any], why: str) -> "PairVerdict":
        """Return this evidence below a verdict that rests on more evidence."""
        first, *others = self.sentences
        sentences = (why, f"{self.verdict}: {first}", *others)
        return PairVerdict(verdict, {**numbers, "disagreement": self.verdict, **self.numbers}, sentences, self.table)

    def lines(self) -> list[str]:
        """Return the verdict with everything behind it, as lines of the report."""
        first, *others = self.sentences
        return [f"{self.verdict}: {first}", *others, *(["", self.table] if self.table else []), ""]


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
    num_rollouts: int,
    num_steps: int,
    config: Config,
    out: RunWriter,
    about: str = "",
    spent: Mapping[str, float | None] | None = None,
    evidence: PairVerdict,
) -> None:
    """Write `report.txt`, the counts of the manifest, and its summary with verdict and exit code.

    `num_rollouts` and `num_steps` are those of the rollouts that were read; `about` is a further line for the report.
    spent: the cost of each teacher's answers in USD, None where not known.
    """
    rules, density = pairs.rules, pairs.number / max(num_rollouts, 1)
    words = word_signal(pairs.texts())
    out.count(
        planned=num_steps, pairs=pairs.number, **{f"dropped_{reason}": n for reason, n in sorted(dropped.items())}
    )
    out.set_summary(
        evidence=evidence.verdict,
        pairs=pairs.number,
        rollouts=num_rollouts,
        pairs_per_rollout=density,
        rules=dict(rules),
        dropped=dict(dropped),
        words=words and asdict(words),
        **evidence.numbers,
    )
    found = judge(out.path, out.manifest.summary, config)
    out.manifest.outcome = out.manifest.outcome.judged(found)
    if spent is not None and pairs.number:
        price = {name: None if usd is None else usd / pairs.number for name, usd in spent.items()}
        known = [usd for usd in price.values() if usd is not None]
        price["all"] = sum(known) if len(known) == len(spent) else None
        out.set_summary(usd_per_pair=price)
        shown = {name: "not known" if usd is None else f"{usd:.4f}" for name, usd in price.items()}
        each = ", ".join(f"{name} {usd}" for name, usd in shown.items() if name != "all")
        about = f"{about}\nthe teachers' answers cost {shown['all']} USD a kept pair ({each})".strip()
    of = f"{counted(num_steps, 'step')} of {counted(num_rollouts, 'rollout')}"
    lines = [f"{counted(pairs.number, 'pair')} from {of}: {density:.2f} a rollout"]
    lines += [about] if about else []
    lines += [aligned(sorted(rules.items()))] if rules else []
    lines += ["", "dropped", *([aligned(sorted(dropped.items()))] if dropped else []), ""]
    lines += [*evidence.lines(), found.line]
    out.write_file("report.txt", "\n".join(lines) + "\n")
