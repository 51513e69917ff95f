"""What a pilot says of the tasks: rates for a plan, each with where it came from.

A pilot is any rollouts of the start model, or an earlier evaluation. What it cannot tell is assumed, and said to be.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from stages.evaluation.arms import START, Item, failed, without_twins
from stages.evaluation.comparison import gain_by_seed, outcomes
from stages.evaluation.paired import MIN_SEEDS
from stages.evaluation.simulation import World, correlation_of

Rates = dict[str, tuple[float, str]]
"""A rate and where it came from, by the name of its field in `World`."""
PILOT, ASSUMED, GIVEN = "pilot", "assumed", "given"


@dataclass(frozen=True)
class Price:
    """What a rollout costs; None where nobody said."""

    usd: float | None = None


def measure(items: Sequence[Item], baseline: str, treatment: str) -> Rates:
    """What the items tell: of the baseline, of the start where that was not played, or of all."""
    rows = [item for item in without_twins(list(items)) if not failed(item)]
    arms: dict[str, list[Item]] = defaultdict(list)
    for item in rows:
        arms[item["arm"]].append(item)
    of_one = arms.get(baseline) or arms.get(START) or rows
    if not of_one:
        return {}
    base = float(np.clip(np.mean([item["passed"] for item in of_one]), 0.5 / len(of_one), 1 - 0.5 / len(of_one)))
    rates: Rates = {"base": (base, PILOT)}
    repeat = differing(of_one, lambda item: (item["train_seed"], item["task_id"]))
    if repeat is not None:
        rates["repeat"] = (float(np.clip(repeat, 0.01, 2 * base * (1 - base))), PILOT)
        rates |= _family_share(of_one, base, rates["repeat"][0])
    if found := outcomes(arms.get(treatment, []), arms.get(baseline, []), "passed"):
        a, b = found.treatment_ST, found.baseline_ST
        rates["discordance"] = (float(np.nanmean(a * (1 - b) + b * (1 - a))), PILOT)
        gains = list(gain_by_seed(arms[treatment], arms[baseline]).values())
        if len(gains) >= MIN_SEEDS:
            rates["seed_spread"] = (float(np.std(gains, ddof=1)), PILOT)
    return rates


def differing(items: Iterable[Item], key: Any, several: Any = None) -> float | None:
    """How often two rollouts with the same key differ, each key counting once; None without two of any.

    With `several`, only rollouts that differ in it are compared.
    """
    groups: dict[Any, list[tuple[Any, bool]]] = defaultdict(list)
    for item in items:
        groups[key(item)].append((several(item) if several else None, item["passed"]))
    shares = []
    for rows in groups.values():
        pairs = [a[1] != b[1] for a, b in combinations(rows, 2) if several is None or a[0] != b[0]]
        shares += [sum(pairs) / len(pairs)] if pairs else []
    return sum(shares) / len(shares) if shares else None


def _family_share(items: list[Item], base: float, repeat: float) -> Rates:
    between = differing(items, lambda item: (item["train_seed"], item["family"]), lambda item: item["task_id"])
    if between is None:
        return {}
    same_task = correlation_of(base, base, base - repeat / 2)
    same_family = correlation_of(base, base, base - between / 2)
    return {"family_share": (float(np.clip(same_family / max(same_task, 1e-6), 0, 1)), PILOT)}


def complete(rates: Rates, gain: float) -> Rates:
    """All rates of a world: what is known, and assumptions for the rest."""
    default = World()
    base = rates.get("base", (default.base, ASSUMED))
    chance = base[0] + (base[0] + gain) - 2 * base[0] * (base[0] + gain)
    known = rates.get("discordance", (1.25 * rates["repeat"][0] + abs(gain) if "repeat" in rates else None, ASSUMED))
    least, most = abs(gain) + 1e-3, max(chance, abs(gain) + 1e-3)
    discordance = float(np.clip(default.discordance if known[0] is None else known[0], least, most))
    repeat = rates.get("repeat", (min(default.repeat, 0.8 * discordance), ASSUMED))
    return {
        "base": base,
        "repeat": repeat,
        "discordance": (discordance, known[1]),
        "family_share": rates.get("family_share", (default.family_share, ASSUMED)),
        "seed_spread": rates.get("seed_spread", (default.seed_spread, ASSUMED)),
    }
