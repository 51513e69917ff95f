"""What came of extracting pairs: how many by rule, what was dropped by reason, and what speaks for them."""

from collections import Counter
from collections.abc import Mapping
from heapq import heappush, heappushpop
from typing import Any

from pyarrow import RecordBatch
from tabulate import tabulate

from stages.pairs.agreement import Verdict
from stages.pairs.rows import Named
from stages.pairs.signal import Signal, signal
from stages.runs.artifact import Out
from stages.runs.records import Row

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
    out: Out,
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
    out.conclude(
        pairs=pairs.number,
        pairs_per_trace=density,
        rules=dict(rules),
        dropped=dict(dropped),
        words=direction and vars(direction),
    )
    if evidence is not None:
        said, numbers, _ = evidence
        ok = {"SIGNAL": True, "NO SIGNAL": False}.get(said)
        out.conclude(ok=ok, exit_code=1 if ok is False else 0, verdict=said, **numbers)
    if spent is not None and pairs.number:
        price = {name: None if usd is None else usd / pairs.number for name, usd in spent.items()}
        known = [usd for usd in price.values() if usd is not None]
        price["all"] = sum(known) if len(known) == len(spent) else None
        out.conclude(usd_per_pair=price)
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
