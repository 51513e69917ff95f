"""Measure the rates of a pilot (rollouts of the start model, or an earlier evaluation); assume what it leaves open."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations

import numpy as np

from composer_stages.errors import UsageError
from composer_stages.evaluation.inference import MIN_SEEDS
from composer_stages.evaluation.outcomes import START, items_table, paired
from composer_stages.evaluation.task_model import (
    ASSUMED,
    GIVEN,
    PILOT,
    Rates,
    TaskModel,
    chance_of_difference,
    correlation_of,
    latent_correlations,
    task_model,
)
from composer_stages.runs.kinds import Row

BETWEEN = "between"
"""How often rollouts of two tasks of one unit differ: measured, and turned into `family_correlation` by `complete`."""


def measure(items: Sequence[Row], baseline: str, treatment: str) -> Rates:
    """Return the rates that a pilot gives: of the baseline, of the start where that was not played, or of all items.

    A pilot is any rollouts of the start model, or an earlier evaluation.
    """
    rows, of_one = known_items(items, baseline)
    if not of_one:
        return {}
    base = float(np.clip(np.mean([item["passed"] for item in of_one]), 0.5 / len(of_one), 1 - 0.5 / len(of_one)))
    rates: Rates = {"pass_rate": (base, PILOT)}
    differing = share_differing(of_one, lambda item: (item["train_seed"], item["task_id"]))
    if differing is not None:
        rates["samples_differ"] = (float(np.clip(differing, 0.01, 2 * base * (1 - base))), PILOT)
    between = share_differing(of_one, lambda item: (item["train_seed"], unit_of(item)), lambda item: item["task_id"])
    if between is not None:
        rates[BETWEEN] = (between, PILOT)
    if paired_outcomes := paired(items_table(rows), treatment, baseline):
        a, b = paired_outcomes.treatment_ST, paired_outcomes.baseline_ST
        rates["arms_differ"] = (float(np.nanmean(a * (1 - b) + b * (1 - a))), PILOT)
        gains = list(paired_outcomes.gain_by_seed.values())
        if len(gains) >= MIN_SEEDS:
            rates["seed_sd"] = (float(np.std(gains, ddof=1)), PILOT)
    return rates


def known_items(items: Iterable[Row], baseline: str) -> tuple[list[Row], list[Row]]:
    """Return a pilot's items of known outcome, and of these the baseline's, else the start's, else all."""
    rows = [item for item in items if item["passed"] is not None and item["error_type"] is None]
    arms: dict[str, list[Row]] = defaultdict(list)
    for item in rows:
        arms[item["arm"]].append(item)
    return rows, arms.get(baseline) or arms.get(START) or rows


def share_differing(
    items: Iterable[Row], key: Callable[[Row], Hashable], distinct_by: Callable[[Row], Hashable] | None = None
) -> float | None:
    """Return how often two rollouts with the same key differ, each key counting once; None without two of any.

    distinct_by: only rollouts that differ in this key are compared.
    """
    groups: dict[Hashable, list[tuple[Hashable, bool]]] = defaultdict(list)
    for item in items:
        groups[key(item)].append((distinct_by(item) if distinct_by else None, item["passed"]))
    shares = []
    for rows in groups.values():
        pairs = [a[1] != b[1] for a, b in combinations(rows, 2) if distinct_by is None or a[0] != b[0]]
        shares += [sum(pairs) / len(pairs)] if pairs else []
    return sum(shares) / len(shares) if shares else None


def unit_of(item: Row) -> str:
    """Return the unit that an item's task is one of; its family, or the task itself, where no unit is recorded."""
    return str(item.get("unit") or item["family"] or item["task_id"])


def complete(rates: Rates, gain: float) -> Rates:
    """Return all rates of a task model: the known ones, and assumptions for the rest."""
    default = TaskModel()
    base = rates.get("pass_rate", (default.pass_rate, ASSUMED))
    if "samples_differ" in rates and rates["samples_differ"][1] != GIVEN:
        # A pilot's rate may contradict a pass rate that was given.
        most = chance_of_difference(base[0], base[0])
        rates = {**rates, "samples_differ": (min(rates["samples_differ"][0], most), PILOT)}
    if "arms_differ" in rates:
        arms_differ, source = rates["arms_differ"]
    else:
        more = 1.25 * rates["samples_differ"][0] + abs(gain) if "samples_differ" in rates else default.arms_differ
        arms_differ, source = more, ASSUMED
    if source != GIVEN:  # a given rate that contradicts the others is refused, by `latent_correlations`
        most = chance_of_difference(base[0], base[0] + gain)
        arms_differ = float(np.clip(arms_differ, min(abs(gain) + 1e-3, most), most))
    assumed = min(default.samples_differ, 0.8 * arms_differ, chance_of_difference(base[0], base[0]))
    samples_differ = rates.get("samples_differ", (assumed, ASSUMED))
    share = rates.get("family_correlation", (default.family_correlation, ASSUMED))
    if BETWEEN in rates and "family_correlation" not in rates:
        # Without repeated rollouts in the pilot the correlation rests on an assumed rate, but not on nothing.
        same_task = correlation_of(
            base[0], base[0], base[0] - min(samples_differ[0], chance_of_difference(base[0], base[0])) / 2
        )
        same_unit = correlation_of(base[0], base[0], base[0] - rates[BETWEEN][0] / 2)
        share = (float(np.clip(same_unit / max(same_task, 1e-6), 0, 1)), PILOT)
    return {
        "pass_rate": base,
        "samples_differ": samples_differ,
        "arms_differ": (arms_differ, source),
        "family_correlation": share,
        "seed_sd": rates.get("seed_sd", (default.seed_sd, ASSUMED)),
    }


def bootstrap(items: Sequence[Row], num: int) -> Iterator[list[Row]]:
    """Yield `num` pilots, each of as many units drawn from this pilot's with replacement; none of an empty one."""
    by_unit: dict[str, list[Row]] = defaultdict(list)
    for item in items:
        by_unit[unit_of(item)].append(item)
    units, random = list(by_unit), np.random.default_rng(0)
    for _ in range(num if len(units) > 1 else 0):
        rows: list[Row] = []
        for copy, index in enumerate(random.integers(0, len(units), len(units))):
            # A unit that is drawn twice is two units, whose tasks are two tasks.
            tag = f"#{copy}"
            rows += [
                {**item, "unit": units[index] + tag, "task_id": item["task_id"] + tag} for item in by_unit[units[index]]
            ]
        yield rows


def fit_models(
    pilots: Iterable[Sequence[Row]], rates_of: Callable[[Sequence[Row]], Rates], gain: float
) -> list[TaskModel]:
    """Return the task models of pilots; those whose rates contradict the gain (a pass rate near 1) are no model."""
    models = []
    for rows in pilots:
        with suppress(UsageError):
            model = task_model(rates_of(rows))
            latent_correlations(model, gain)
            models.append(model)
    return models
