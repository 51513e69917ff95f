"""How often `composer compare` is right, beside the tests that people use: its level, its power and its coverage.

    python benchmarks/compare.py [levels] [--experiments 1000]

Two sides answer the same tasks. A task has a difficulty, shared in part by the tasks of a document (`clusters` of
five); each side passes it or scores it by chance around that. Scores are skewed: most differences are small, some are
large losses or gains. `missing`: the second side has no outcome for 5 % of the tasks, three in four of them tasks that
it would have failed; they are left out on both sides. `gain`: what an average task gains; 0 asks for the level.

paired t: Student's t over tasks, as `evalconfidence` takes it for scores. McNemar: the exact test of pass and fail.
permutation: sign flips of tasks over the mean, as `paired-eval` takes them. None of these knows documents.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import cases
import numpy as np
from records import Claim, measured
from scipy.special import bdtr, stdtr

from stages.evaluation.inference import PairedTest

SIZES = (50, 300, 2000)
GAINS = {50: 0.2, 300: 0.08, 2000: 0.03}
"""The gain whose power is asked, by the number of tasks."""
CLUSTER = 5
BLOCK = 250
GOAL = "<= 8"
"""Of the level in per cent, noise of the simulation included."""


def draw(
    num: int, tasks: int, gain: float, binary: bool, clustered: bool, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return outcomes of both sides [X, T] in 0..1, and the document of each task."""
    unit = np.arange(tasks) // CLUSTER if clustered else np.arange(tasks)
    documents = int(unit.max()) + 1
    shared, gains = random.normal(size=(num, documents)), random.normal(size=(num, documents))
    weight = 0.7 if clustered else 0.0
    own = random.normal(size=(num, tasks))
    difficulty = weight**0.5 * shared[:, unit] + (1 - weight) ** 0.5 * own
    # What a side gains on a document is shared by its tasks, which is what makes them no independent evidence.
    shift = 0.35 * gains[:, unit] if clustered else 0.0
    if binary:
        # The probit of an average task moves a rate of one half by 0.36 at a spread of difficulties of one.
        moved = gain / 0.282
        first = difficulty + 0.5 * random.normal(size=(num, tasks)) > 0
        second = difficulty + moved * 1.12 + shift + 0.5 * random.normal(size=(num, tasks)) > 0
        return second.astype(float), first.astype(float), unit
    base = 1 / (1 + np.exp(-difficulty))
    apart = (random.exponential(size=(num, tasks)) ** 1.5 - 1.3293) * 0.06
    return base + gain / 4 + apart + 0.1 * shift, base, unit


def thinned(second: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the second side without 5 % of its outcomes, three in four of them below its median or failed."""
    low = second <= np.median(second, axis=1, keepdims=True)
    chance = np.where(low, 0.075, 0.025)
    return np.where(random.random(second.shape) < chance, np.nan, second)


def verdicts(second: np.ndarray, first: np.ndarray, unit: np.ndarray, binary: bool) -> dict[str, np.ndarray]:
    """Return [X] whether each test finds a difference, and whether our interval covers it."""
    apart = second - first
    num = apart.shape[1]
    test = PairedTest(second[:, None], first[:, None], unit, scores=not binary, num_flips=399)
    found = {"composer": test.rejects(0.0)}
    mean, sd = apart.mean(1), np.maximum(apart.std(1, ddof=1), 1e-12)
    found["paired t"] = 2 * stdtr(num - 1, -np.abs(mean) / sd * num**0.5) < 0.05
    if binary:
        wins, losses = (apart > 0).sum(1), (apart < 0).sum(1)
        fewest, both = np.minimum(wins, losses), wins + losses
        found["McNemar"] = np.minimum(2 * bdtr(fewest, np.maximum(both, 1), 0.5), 1) < 0.05
    signs = np.random.default_rng(7).integers(0, 2, size=(399, num)) * 2.0 - 1
    flipped = np.abs(apart @ signs.T) >= np.abs(apart.sum(1))[:, None] * (1 - 1e-9)
    found["permutation"] = (flipped.sum(1) + 1) / 400 < 0.05
    return found


def levels(experiments: int = 1000) -> Iterator[Claim]:
    """Level and power of each test, by size, clusters, kind of score and missing outcomes."""
    print("| tasks | outcomes | of one document | missing | true gain | composer | paired t | McNemar | permutation |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    worst: dict[str, float] = {}
    for tasks in SIZES:
        for binary in (True, False):
            for clustered in (False, True):
                for missing in (False, True):
                    for gain in (0.0, GAINS[tasks]):
                        found = frequencies(experiments, tasks, gain, binary, clustered, missing)
                        cells = [f"{found[name]:.3f}" if name in found else "" for name in TESTS]
                        kind, alike = "pass or fail" if binary else "skewed scores", "5" if clustered else "1"
                        lost, shown = "5 %" if missing else "none", f"{gain if binary else gain / 4:g}"
                        print("|", " | ".join([f"{tasks:,}", kind, alike, lost, shown, *cells]), "|", flush=True)
                        if not gain and not missing:
                            name = f"{kind}, {alike} of one document"
                            worst[name] = max(worst.get(name, 0.0), found["composer"])
    for name, value in worst.items():
        error = 1.96 * float(np.sqrt(value * (1 - value) / experiments))
        claim = f"{name}: a difference is found where there is none, at most over {', '.join(map(str, SIZES))} tasks"
        between = (max(100 * (value - error), 0.0), 100 * (value + error))
        yield measured(claim, 100 * value, between, n=experiments, unit="%", goal=GOAL)


TESTS = ("composer", "paired t", "McNemar", "permutation")


def frequencies(
    experiments: int, tasks: int, gain: float, binary: bool, clustered: bool, missing: bool
) -> dict[str, float]:
    """Return how often each test finds a difference."""
    random = np.random.default_rng([tasks, binary, clustered, missing, int(100 * gain)])
    every: dict[str, list[np.ndarray]] = {}
    block = BLOCK if tasks < 1000 else 50
    for _ in range(experiments // block):
        second, first, unit = draw(block, tasks, gain, binary, clustered, random)
        if not missing:
            parts = [(second, first, unit)]
        else:  # which tasks are left is another question in each experiment
            there = ~np.isnan(thinned(second, random))
            parts = [
                (second[at : at + 1, kept], first[at : at + 1, kept], np.unique(unit[kept], return_inverse=True)[1])
                for at, kept in enumerate(there)
            ]
        for part in parts:
            for name, shown in verdicts(*part, binary).items():
                every.setdefault(name, []).append(shown)
    return {name: float(np.concatenate(shown).mean()) for name, shown in every.items()}


CASES = {"levels": levels}

if __name__ == "__main__":
    cases.main(__file__, CASES)
