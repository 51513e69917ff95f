"""How often `composer compare` is right, beside the two packages that do a part of it: level, power and coverage.

    python benchmarks/compare.py levels [--experiments 500]
    python benchmarks/compare.py speed [--items 3000] [--many 1000000] [--rounds 5]

`speed`: the command in a fresh process, in seconds of processor time of all its threads and children, which other
programs on the machine disturb least; on an idle machine it takes no longer than that by the clock.

Two sides answer the same tasks. A task has a difficulty, shared in part by the tasks of a document (`clusters` of
five); each side passes it or scores it by chance around that. Scores are skewed: most differences are small, some are
large losses or gains. `missing`: the second side has no outcome for 5 % of the tasks, three in four of them tasks that
it would have failed; they are left out on both sides. `gain`: what an average task gains; 0 asks for the level.

evalconfidence 0.1.1: McNemar's test and a normal interval for pass and fail, Student's t over tasks for scores.
paired-eval 0.4.0: sign flips of tasks over the mean, and the percentiles of a bootstrap. Both are computed here for
many experiments at once, with 399 flips and resamples. The comparison of neither knows documents.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import cases
import numpy as np
import records
from records import Claim
from scipy.special import bdtr, chdtrc, ndtr, stdtr, stdtrit
from support.score_logs import inspect_document, make, pack

from composer_stages.evaluation.inference import PairedTest

SIZES = (50, 300, 2000)
GAINS = {50: 0.2, 300: 0.08, 2000: 0.03}
"""The gain whose power is asked, by the number of tasks."""
CLUSTER = 5
BLOCK = 250
DRAWS = 399
SPREAD = 0.35
"""Of what a side gains on a document."""
OURS, T, FLIPS = PROGRAMS = ("compare", "evalconfidence", "paired-eval")


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
    shift = SPREAD * gains[:, unit] if clustered else 0.0
    if binary:
        first = difficulty + 0.5 * random.normal(size=(num, tasks)) > 0
        second = difficulty + probit(gain) + shift + 0.5 * random.normal(size=(num, tasks)) > 0
        return second.astype(float), first.astype(float), unit
    base = 1 / (1 + np.exp(-difficulty))
    apart = (random.exponential(size=(num, tasks)) ** 1.5 - 1.3293) * 0.06
    return base + gain / 4 + apart + 0.1 * shift, base, unit


def probit(gain: float) -> float:
    """Return by how much an average task's probit is moved: 0.36 for a rate of one half, at this spread."""
    return gain / 0.282 * 1.12


def truth(gain: float, binary: bool, clustered: bool) -> float:
    """Return the expected difference of the sides."""
    return float(ndtr(probit(gain) / (1.25 + clustered * SPREAD**2) ** 0.5)) - 0.5 if binary else gain / 4


def thinned(second: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the second side without 5 % of its outcomes, three in four of them below its median or failed."""
    low = second <= np.median(second, axis=1, keepdims=True)
    chance = np.where(low, 0.075, 0.025)
    return np.where(random.random(second.shape) < chance, np.nan, second)


def verdicts(second: np.ndarray, first: np.ndarray, unit: np.ndarray, binary: bool, true: float) -> np.ndarray:
    """Return [P, 3, X] of each program whether it finds a difference, a gain, and whether its interval covers."""
    apart = second - first
    num, mean = apart.shape[1], apart.mean(1)
    test = PairedTest(second[:, None], first[:, None], unit, scores=not binary, num_flips=DRAWS)
    found, covers = [test.rejects(0.0)], [~test.rejects(true)]
    if binary:
        wins, losses = (apart > 0).sum(1), (apart < 0).sum(1)
        both = wins + losses
        exact = 2 * bdtr(np.minimum(wins, losses), np.maximum(both, 1), 0.5)
        corrected = chdtrc(1, (np.abs(wins - losses) - 1) ** 2 / np.maximum(both, 1))
        found.append(np.where(both <= 25, exact, corrected) < 0.05)
        half = 1.959964 * np.sqrt((both / num - mean**2) / num)
    else:
        error = np.maximum(apart.std(1, ddof=1), 1e-12) / num**0.5
        found.append(2 * stdtr(num - 1, -np.abs(mean) / error) < 0.05)
        half = stdtrit(num - 1, 0.975) * error
    covers.append(np.abs(mean - true) <= half)
    random = np.random.default_rng(7)
    signs = random.integers(0, 2, size=(DRAWS, num)) * 2.0 - 1
    flipped = np.abs(apart @ signs.T) >= np.abs(apart.sum(1))[:, None] * (1 - 1e-9)
    found.append((flipped.sum(1) + 1) / (DRAWS + 1) < 0.05)
    drawn = np.sort(apart @ random.multinomial(num, [1 / num] * num, size=DRAWS).T / num, axis=1)
    covers.append((drawn[:, int(0.025 * DRAWS)] <= true) & (true <= drawn[:, int(0.975 * DRAWS) - 1]))
    return np.stack([(moved, moved & (mean > 0), cover) for moved, cover in zip(found, covers, strict=True)])


def levels(experiments: int = 500) -> Iterator[Claim]:
    """Level, power and coverage of each program, by size, clusters, kind of score and missing outcomes."""
    rows, worst = [], dict[str, tuple[float, float]]()
    for tasks, binary, clustered, missing in product(SIZES, (True, False), (False, True), (False, True)):
        kind, alike = "pass or fail" if binary else "skewed scores", "5" if clustered else "1"
        gain = GAINS[tasks]
        null, real = (frequencies(experiments, tasks, of, binary, clustered, missing) for of in (0.0, gain))
        rows.append(
            {
                "tasks": f"{tasks:,}",
                "outcomes": kind,
                "of one document": alike,
                "missing": "5 %" if missing else "none",
                "a difference in nothing": cell(null[:, 0]),
                "a gain in nothing": cell(null[:, 1]),
                "intervals that cover": cell((null[:, 2] + real[:, 2]) / 2),
                "the gain": f"{truth(gain, binary, clustered):.2g}",
                "found": cell(real[:, 0]),
            }
        )
        print(*rows[-1].values(), sep=" | ", flush=True)
        if not missing:
            world = f"{kind}, {alike} of one document"
            level, covered = worst.get(world, (0.0, 1.0))
            worst[world] = max(level, null[0, 0]), min(covered, null[0, 2], real[0, 2])
    records.keep(__file__, "levels", rows)
    sizes = ", ".join(map(str, SIZES))
    for world, (level, covered) in worst.items():
        for words, rate, goal in (
            ("a difference is found where there is none, at most", level, "<= 8"),
            ("an interval covers the true difference, at least", covered, ">= 92"),
        ):
            yield records.share(f"{world}: {words} over {sizes} tasks", round(rate * experiments), experiments, goal)


def cell(shares: np.ndarray) -> str:
    """Return the shares of all programs in per cent."""
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def frequencies(experiments: int, tasks: int, gain: float, binary: bool, clustered: bool, missing: bool) -> np.ndarray:
    """Return [P, 3] how often each program finds a difference, a gain, and covers the true difference."""
    random = np.random.default_rng([tasks, binary, clustered, missing, int(100 * gain)])
    true, found = truth(gain, binary, clustered), []
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
        found += [verdicts(*part, binary, true) for part in parts]
    shares: np.ndarray = np.concatenate(found, axis=2).mean(2)
    return shares


def speed(items: int = 3000, many: int = 1_000_000, rounds: int = 5) -> Iterator[Claim]:
    """Processor time and memory of comparisons in fresh processes: tables, and an Inspect archive of transcripts."""
    goals = {"csv": "<= 0.95", "jsonl": "<= 0.95", "parquet": "<= 0.95", "inspect .eval": "<= 1.8"}
    for name, goal in goals.items():
        taken = [spent(name, items) for _ in range(rounds)]
        seconds = sorted(second for second, _ in taken)
        what = f"{items:,} items a side, {name}: processor time"
        yield records.measured(
            what, statistics.median(seconds), (seconds[0], seconds[-1]), n=rounds, unit="s", goal=goal
        )
    second, peak = spent("csv", many)
    yield records.measured(f"{many:,} items a side, csv: processor time", second, n=1, unit="s", goal="<= 12")
    yield records.measured(f"{many:,} items a side, csv: memory", peak / 1e9, n=1, unit="GB", goal="<= 1.5")


def spent(name: str, items: int) -> tuple[float, float]:
    """Return the processor time of a comparison of two logs of this format, and its largest resident size in bytes."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for side, rate in (("a", 0.5), ("b", 0.52)):
            scores = (random.random(items) < rate).astype(float).tolist()
            if name == "inspect .eval":
                log = inspect_document(scores)
                for sample in log["samples"]:
                    sample["messages"] *= 40
                    sample["messages"][1] = {"role": "assistant", "content": "lorem ipsum " * 400}
                paths.append(Path(folder, f"{side}.eval"))
                pack(paths[-1], log)
            else:
                paths.append(make(Path(folder, side), name, scores))
        command = [sys.executable, "-m", "composer_cli", "compare", *map(str, paths), "--out", f"{folder}/run", "-q"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        assert os.waitstatus_to_exitcode(status) in (0, 1, 3), status
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


CASES = {"levels": levels, "speed": speed}

if __name__ == "__main__":
    cases.main(__file__, CASES)
