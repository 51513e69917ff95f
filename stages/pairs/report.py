"""Report the result of an extraction: pairs by rule, drops by reason, and the verdict by its criterion."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import RecordBatch

from composer_stages.evaluation.inference import one_sided_p
from composer_stages.layout import aligned
from composer_stages.pairs.config import Config
from composer_stages.pairs.groups import NamedStates
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Judgement, RunWriter
from composer_stages.words import Sentence

SHUFFLES = 500
MIN_TEXTS, MOST_TEXTS = 5, 20_000
CRITERION_P = 0.05
"""The largest p-value of the words' KL against shuffled sides with which the criterion passes."""
PAIRS_A_STEP, MOST_NEEDED = 0.1, 5.0
"""Pairs that are needed for each step of a rollout, and at most of a rollout, where no setting says so."""
MIN_ROLLOUTS = 6
"""With fewer rollouts the mean number of pairs says little about the model and its teachers."""
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
    """Compute the distance between the words of (chosen, rejected) texts; None with fewer than `MIN_TEXTS` pairs.

    KL(chosen || rejected) between the distributions of words that only one side of a pair has, with add-one smoothing.
    The null swaps sides at random. The KL depends as much on how popular words are as on which side is right.
    """
    if len(pairs) < MIN_TEXTS:
        return None
    bags = [(Counter(chosen.split()), Counter(rejected.split())) for chosen, rejected in pairs]
    distinct = [(chosen - rejected, rejected - chosen) for chosen, rejected in bags]
    words = {word: i for i, word in enumerate(sorted({w for sides in distinct for side in sides for w in side}))}
    entries = [
        (p, s, words[w], n) for p, sides in enumerate(distinct) for s, side in enumerate(sides) for w, n in side.items()
    ]
    # [N]: one entry for each pair, side and word that the other side lacks
    pair, side, word, number = np.array(entries, dtype=np.int64).reshape(-1, 4).T

    def kl(swapped: np.ndarray) -> float:
        side_of = side ^ swapped[pair]
        chosen, rejected = (
            np.bincount(word, weights=number * (side_of == s), minlength=max(len(words), 1)) for s in (0, 1)
        )
        # One is added to every count, so that a word of one side alone does not make the divergence infinite.
        p, q = (chosen + 1) / (chosen + 1).sum(), (rejected + 1) / (rejected + 1).sum()
        return float((p * np.log(p / q)).sum())

    random = np.random.default_rng(seed)
    observed = kl(np.zeros(len(pairs), dtype=np.int64))
    shuffled = np.array([kl(random.integers(0, 2, size=len(pairs))) for _ in range(SHUFFLES)])
    return WordSignal(observed, float(np.quantile(shuffled, 0.95)), one_sided_p(shuffled, observed, 1e-12))


def judge(folder: Path, summary: Mapping[str, Any], config: Config) -> Judgement:
    """Return the verdict on pairs: FAIL by the criterion, TOO LITTLE DATA for it, else the verdict of their evidence.

    The criterion: enough pairs per rollout, whose words differ from those of random pairs. NO SIGNAL precedes it.
    """
    density, rollouts, words = summary["pairs_per_rollout"], summary["rollouts"], summary["words"]
    needed = config.min_pairs_per_rollout
    if needed is None:  # a rollout of one answer has no more than one disputed step
        needed = min(MOST_NEEDED, PAIRS_A_STEP * summary.get("steps", math.inf) / max(rollouts, 1))
    criterion = "PASS"
    if rollouts < MIN_ROLLOUTS:
        criterion = "TOO LITTLE DATA"
    elif density < needed or (words and words["p_value"] > CRITERION_P):
        criterion = "FAIL"
    elif not words:
        criterion = "TOO LITTLE DATA"
    line = Sentence(
        "pairs.criterion",
        criterion=criterion,
        density=density,
        needed=needed,
        rollouts=rollouts,
        rollouts_needed=MIN_ROLLOUTS,
        words=words,
        pairs_needed=MIN_TEXTS,
        largest_p=CRITERION_P,
    )
    evidence = summary["evidence"]
    verdict = evidence if criterion == "PASS" or evidence == "NO SIGNAL" else criterion
    ok = {"SIGNAL": True, "NO SIGNAL": False, "FAIL": False}.get(verdict)
    return Judgement(ok, EXIT_CODES[verdict], line, {"verdict": verdict})


@dataclass(frozen=True)
class PairVerdict:
    """The evidence for the pairs of a run: the verdict, the numbers of the manifest, sentences, the teachers' audit.

    sentences: the first one is the reason for the verdict.
    """

    verdict: str
    numbers: dict[str, Any]
    sentences: tuple[str, ...]
    table: str = ""

    def below(self, verdict: str, numbers: dict[str, Any], reason: str) -> "PairVerdict":
        """Return this evidence ranked below a stronger verdict."""
        first, *remaining = self.sentences
        sentences = (reason, f"{self.verdict}: {first}", *remaining)
        return PairVerdict(verdict, {**numbers, "disagreement": self.verdict, **self.numbers}, sentences, self.table)

    def lines(self) -> list[str]:
        """Return the verdict and its evidence as lines of the report."""
        first, *remaining = self.sentences
        return [f"{self.verdict}: {first}", *remaining, *(["", self.table] if self.table else []), ""]


@dataclass(eq=False)
class PairTally:
    """Running totals of pairs: their number, rules and states, and the texts of both sides.

    Of more than `MOST_TEXTS` pairs the texts are those of a random sample, by the digests that are the pairs' ids.
    """

    number: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    states: NamedStates = field(default_factory=NamedStates)
    _texts: list[tuple[int, int, str, str]] = field(default_factory=list, init=False)
    """A heap of (minus the digest, index, chosen, rejected): its first entry is replaced next."""

    def add(self, row: Row) -> None:
        """Add one pair."""
        self.rules[row["rule"]] += 1
        self.states.add(row["state_id"])
        self._add_texts(row["pair_id"], self.number, row["chosen"], row["rejected"])
        self.number += 1

    def add_all(self, rows: RecordBatch) -> None:
        """Add all pairs of a batch."""
        self.rules.update({entry["values"]: entry["counts"] for entry in rows["rule"].value_counts().to_pylist()})
        for name in rows["state_id"].unique().to_pylist():
            self.states.add(name)
        names, texts = rows["pair_id"].to_pylist(), (rows["chosen"], rows["rejected"])
        # Only sampled texts become Python strings: most pairs of a large run are not sampled.
        for index, name in enumerate(names):
            if len(self._texts) < MOST_TEXTS or -int(name, 16) > self._texts[0][0]:
                self._add_texts(name, self.number + index, *(side[index].as_py() for side in texts))
        self.number += len(names)

    def _add_texts(self, name: str, index: int, chosen: str, rejected: str) -> None:
        entry = (-int(name, 16), index, chosen, rejected)
        (heappush if len(self._texts) < MOST_TEXTS else heappushpop)(self._texts, entry)

    def texts(self) -> list[tuple[str, str]]:
        """Return the sampled (chosen, rejected) texts, in the order of the pairs."""
        return [(chosen, rejected) for _, _, chosen, rejected in sorted(self._texts, key=lambda entry: entry[1])]


def report(
    pairs: PairTally,
    dropped: Counter[str],
    *,
    num_rollouts: int,
    num_steps: int,
    config: Config,
    out: RunWriter,
    note: str = "",
    costs: Mapping[str, float | None] | None = None,
    evidence: PairVerdict,
) -> None:
    """Write `report.txt`, the counts of the manifest, and its summary with verdict and exit code.

    note: a further line of the report. costs: USD of each teacher's answers, None if not known.
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
        steps=num_steps,
        pairs_per_rollout=density,
        rules=dict(rules),
        dropped=dict(dropped),
        words=words and asdict(words),
        **evidence.numbers,
    )
    judgement = judge(out.path, out.manifest.summary, config)
    out.manifest.outcome = out.manifest.outcome.judged(judgement)
    if costs is not None and pairs.number:
        price = {name: None if usd is None else usd / pairs.number for name, usd in costs.items()}
        prices = [usd for usd in price.values() if usd is not None]
        price["all"] = sum(prices) if len(prices) == len(costs) else None
        out.set_summary(usd_per_pair=price)
        note = f"{note}\n{Sentence('pairs.cost-of-pair', prices=list(price.items()))}".strip()
    counts = {"pairs": pairs.number, "steps": num_steps, "rollouts": num_rollouts}
    lines: list[str] = [Sentence("pairs.pairs-from-steps", **counts, density=density)]
    lines += [note] if note else []
    lines += [aligned(sorted(rules.items()))] if rules else []
    lines += ["", "dropped", *([aligned(sorted(dropped.items()))] if dropped else []), ""]
    out.write_report([*lines, *evidence.lines()], judgement.line)
