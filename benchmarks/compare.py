"""How often `composer compare` is right, beside nine other ways to compare: level, coverage and power; and its speed.

    python benchmarks/compare.py levels [--experiments 1000]
    python benchmarks/compare.py sides [--experiments 1000] [--tasks 2000]
    python benchmarks/compare.py speed [--items 3000] [--many 1000000] [--rounds 7]

`levels`: the worlds are those of levels.py without a spread of trainings, the same with several samples of a task, its
pilots (`SIZED`; of several trainings the other methods see each task's mean), and pairs of logs. In these a task has a
difficulty, shared in part by the tasks of a document (five); each side passes it or scores it by chance around that.
Scores are skewed: most differences are small, some are large losses or gains; or they are rare: all but few tasks have
the same score on both sides, and these differ by all of the scale. Where outcomes are missing, the second
side has none for 5 % of the tasks, three in four of them tasks that it would have failed; they are left out on both
sides. Methods that know units are told the sampled ones; tasks of fixed units are units of their own.

`sides`: several sides beside one, all on the same tasks, each of which gives the first side's outcome in six cases of
ten. How often anything false is said of any of them, in worlds where it is easiest to say: sides without a gain beside
others that have one, sides that gain exactly the smallest gain of interest, and sides that lose exactly the margin.

`speed`: the command in a fresh process, in seconds of processor time of all its threads and children, which other
programs on the machine disturb least; on an idle machine it takes no longer than that by the clock.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cases
import levels as verdict_levels
import numpy as np
import records
from methods import METHODS, OF_PAIRS, Found, is_binary
from records import Claim
from scipy.special import ndtr
from support.score_logs import inspect_document, make, pack

from composer_stages.comparison.decision import name_side
from composer_stages.comparison.measure import measure_sides
from composer_stages.comparison.pairs import ComparisonRules, PairedSides, ScoreSpan
from composer_stages.evaluation import design as designs
from composer_stages.evaluation.design import Design
from composer_stages.evaluation.difference import GAINS, Decision, Difference
from composer_stages.evaluation.inference import PairedTest
from composer_stages.evaluation.outcomes import PairedOutcomes
from composer_stages.evaluation.task_model import TaskModel

Array = np.ndarray
Sides = tuple[Array, Array]
"""Outcomes of treatment and baseline [X, S, T]."""
CLUSTER = 5
SPREAD = 0.35
"""Of what a side gains on a document."""
OURS = "compare"


@dataclass(frozen=True)
class World:
    """A world of experiments: the unit of each task, a gain, the true mean at a gain, and what draws experiments.

    draw: from a gain, a number of experiments and random numbers. fixed: units are strata. missing: outcomes are.
    """

    kind: str
    name: str
    unit: Array
    gain: float
    truth: Callable[[float], float]
    draw: Callable[[float, int, np.random.Generator], Sides]
    fixed: bool = False
    scores: bool = False
    missing: bool = False


def worlds() -> Iterator[World]:
    """Yield every world, those of a kind in turn."""
    for name, (model, design) in verdict_levels.LAYOUTS.items():
        yield of_tasks(kind_of(design), name, replace(model, seed_sd=0.0), design, 0.1)
    for name, (model, design, gain) in SAMPLED.items():
        yield of_tasks(kind_of(design), name, replace(model, seed_sd=0.0), design, gain)
    for name, (model, design, gain) in verdict_levels.SIZED.items():
        yield of_tasks(kind_of(design), name, model, design, gain)
    for tasks, gain in ((50, 0.2), (300, 0.08)):
        for clustered in (False, True):
            for binary in (True, False):
                kind = ("units" if clustered else "tasks alone") if binary else "skewed scores"
                of = "in documents of five" if clustered else "alone"
                yield of_documents(
                    kind, f"{tasks} {'tasks' if binary else 'scores'} {of}", tasks, gain, binary, clustered
                )
    for tasks, share, gain in ((30, 0.1, 0.05), (100, 0.05, 0.05)):
        yield of_rare_differences(f"{tasks} scores, {100 * share:g} % of them unlike", tasks, share, gain)
    for binary in (True, False):
        name = f"300 {'tasks' if binary else 'scores'} in documents of five, 5 % missing"
        yield replace(of_documents("outcomes missing", name, 300, 0.08, binary, True), missing=True)
    for tasks in (20, 50, 200):
        yield of_lopsided_differences(f"{tasks} scores, 5 % of them gain .95, the others lose .05", tasks, 0.05, 0.05)


SAMPLED = {
    "300 tasks, four samples": (verdict_levels.UNLIKE, Design((1,) * 300, samples=4), 0.04),
    "50 tasks, eight samples": (verdict_levels.UNLIKE, Design((1,) * 50, samples=8), 0.08),
    "120 tasks in 12 units, four samples": (verdict_levels.UNLIKE, Design((10,) * 12, samples=4), 0.08),
    "100 tasks passed by 10 %, four samples": (verdict_levels.LOW, Design((1,) * 100, samples=4), 0.05),
}


def kind_of(design: Design) -> str:
    """Return the kind of a world of this design."""
    kinds = {
        "several trainings": design.seeds > 1,
        "several samples": design.samples > 1,
        "tasks alone": design.fixed or max(design.sizes) == 1,
        "few units": len(design.sizes) < 10,
    }
    return next((kind for kind, holds in kinds.items() if holds), "units")


def of_tasks(kind: str, name: str, model: TaskModel, design: Design, gain: float) -> World:
    """Return a world of the planner's model of tasks."""
    return World(
        kind,
        name,
        np.repeat(np.arange(len(design.sizes)), design.sizes),
        gain,
        partial(verdict_levels.true_mean, model, design),
        partial(designs.draw, model, design),
        fixed=design.fixed,
    )


def of_documents(kind: str, name: str, tasks: int, gain: float, binary: bool, clustered: bool) -> World:
    """Return a world of two logs."""
    unit = np.arange(tasks) // CLUSTER if clustered else np.arange(tasks)

    def draw(gain: float, num: int, random: np.random.Generator) -> Sides:
        second, first = outcomes(num, unit, gain, binary, clustered, random)
        return second[:, None], first[:, None]

    return World(kind, name, unit, gain, lambda gain: truth(gain, binary, clustered), draw, scores=not binary)


def of_rare_differences(name: str, tasks: int, share: float, gain: float) -> World:
    """Return a world of scores of which a share differs, by one; with a gain as large as it, upward alone."""

    def draw(gain: float, num: int, random: np.random.Generator) -> Sides:
        place, same = random.random((2, num, 1, tasks))
        up, down = place < (share + gain) / 2, place > 1 - (share - gain) / 2
        return np.where(up, 1.0, np.where(down, 0.0, same)), np.where(up, 0.0, np.where(down, 1.0, same))

    return World("rare differences", name, np.arange(tasks), gain, lambda gain: gain, draw, scores=True)


def of_lopsided_differences(name: str, tasks: int, share: float, gain: float) -> World:
    """Return a world of scores of which a share, and a gain more, gains much, and all others lose a little.

    No method holds its level there: those that gain are often not among few tasks.
    """

    def draw(gain: float, num: int, random: np.random.Generator) -> Sides:
        up, base = random.random((num, 1, tasks)) < share + gain, np.full((num, 1, tasks), share)
        return np.where(up, 1.0, base - share), base

    return World("lopsided scores", name, np.arange(tasks), gain, lambda gain: gain, draw, scores=True)


def outcomes(num: int, unit: Array, gain: float, binary: bool, clustered: bool, random: np.random.Generator) -> Sides:
    """Return outcomes of the second and the first side [X, T] in 0..1."""
    tasks, documents = len(unit), int(unit.max()) + 1
    shared, gains = random.normal(size=(num, documents)), random.normal(size=(num, documents))
    weight = 0.7 if clustered else 0.0
    own = random.normal(size=(num, tasks))
    difficulty = weight**0.5 * shared[:, unit] + (1 - weight) ** 0.5 * own
    # What a side gains on a document is shared by its tasks, which is what makes them no independent evidence.
    shift = SPREAD * gains[:, unit] if clustered else 0.0
    if binary:
        first = difficulty + 0.5 * random.normal(size=(num, tasks)) > 0
        second = difficulty + probit(gain) + shift + 0.5 * random.normal(size=(num, tasks)) > 0
        return second.astype(float), first.astype(float)
    base = 1 / (1 + np.exp(-difficulty))
    apart = (random.exponential(size=(num, tasks)) ** 1.5 - 1.3293) * 0.06
    return base + gain / 4 + apart + 0.1 * shift, base


def probit(gain: float) -> float:
    """Return by how much an average task's probit is moved: 0.36 for a rate of one half, at this spread."""
    return gain / 0.282 * 1.12


def truth(gain: float, binary: bool, clustered: bool) -> float:
    """Return the expected difference of the sides."""
    return float(ndtr(probit(gain) / (1.25 + clustered * SPREAD**2) ** 0.5)) - 0.5 if binary else gain / 4


def thinned(second: Array, random: np.random.Generator) -> Array:
    """Return the second side without 5 % of its outcomes, three in four of them below its median or failed."""
    low = second <= np.median(second, axis=-1, keepdims=True)
    chance = np.where(low, 0.075, 0.025)
    return np.where(random.random(second.shape) < chance, np.nan, second)


def levels(experiments: int = 1000) -> Iterator[Claim]:
    """Level, coverage and power of each method in each world; claims are those of `compare`, the rest a table."""
    rows = []
    for world in worlds():
        null, real = (frequencies(world, gain, experiments) for gain in (0.0, world.gain))
        for name in null:
            # Without a gain, fixed units have true differences of their own.
            level = 1 - null[name][1] if world.fixed else null[name][0]
            finds = np.nan if world.fixed else real[name][0]
            found = {"level": level, "covers": (null[name][1] + real[name][1]) / 2, "finds": finds}
            cells = {column: "" if np.isnan(share) else f"{100 * share:.1f}" for column, share in found.items()}
            rows.append({"kind": world.kind, "world": world.name, "method": name, **cells})
        print(*rows[-len(null)].values(), sep=" | ", flush=True)
        for words, share, of, goal in (
            ("95 % intervals cover the true difference", (null[OURS][1] + real[OURS][1]) / 2, 2, ">= 93"),
            ("a difference is found where there is none", null[OURS][0], 1, "<= 7"),
            (f"a gain of {100 * world.gain:g} points is found", real[OURS][0], 1, None),
        )[: 1 if world.fixed else 3]:
            yield records.share(f"{world.name}: {words}", round(share * of * experiments), of * experiments, goal)
    records.keep(__file__, "levels", rows)


def frequencies(world: World, gain: float, experiments: int) -> dict[str, tuple[float, float]]:
    """Return of each method how often it finds a difference, and how often its interval holds the true one, or NaN."""
    random, true = np.random.default_rng([3, int(1000 * gain)]), world.truth(gain)
    held: dict[str, list[tuple[Array, Array]]] = {}
    block = max(1, min(experiments, 20_000_000 // (400 * len(world.unit))))
    for start in range(0, experiments, block):
        second, first = world.draw(gain, min(block, experiments - start), random)
        parts = [(second, first, world.unit)]
        if world.missing:  # which tasks are left is another question in each experiment
            second = thinned(second, random)
            left = ~np.isnan(second[:, 0])
            parts = [
                (
                    second[at : at + 1, :, kept],
                    first[at : at + 1, :, kept],
                    np.unique(world.unit[kept], return_inverse=True)[1],
                )
                for at, kept in enumerate(left)
            ]
        for part in parts:
            for name, decided in decisions(world, true, *part).items():
                held.setdefault(name, []).append(decided)
    return {
        name: (
            float(np.concatenate([moved for moved, _ in each]).mean()),
            float(np.concatenate([c for _, c in each]).mean()),
        )
        for name, each in held.items()
    }


def decisions(world: World, true: float, second: Array, first: Array, unit: Array) -> dict[str, tuple[Array, Array]]:
    """Return of each method [X] whether it finds a difference, and whether its interval holds the true one, or NaN."""
    test = PairedTest(second, first, unit, fixed=world.fixed, scores=world.scores, num_flips=399)
    found = {OURS: (test.rejects(0.0), (~test.rejects(true)).astype(float))}
    apart = (second - first).mean(1)
    for name, method in METHODS.items():
        if name not in OF_PAIRS or is_binary(apart):
            result = method(apart, np.arange(len(unit)) if world.fixed else unit)
            found[name] = (result.p < 0.05, covers(result, true))
    return found


def covers(found: Found, true: float) -> Array:
    """Return [X] whether intervals hold the true difference, as 0 or 1; NaN where there is none."""
    return np.where(np.isnan(found.low), np.nan, (found.low <= true) & (true <= found.high))


def sides(experiments: int = 1000, tasks: int = 2000) -> Iterator[Claim]:
    """How often `compare` of several sides says anything false of one of them."""
    margin = 0.05

    def gained(found: Sequence[Difference]) -> bool:
        return any(each.decision in (*GAINS, Decision.WORSE) for each in found[len(found) // 2 :])

    def less(found: Sequence[Difference]) -> bool:
        return any(
            each.decision in (Decision.BETTER_BY_LESS, Decision.NO_GAIN, Decision.NO_DIFFERENCE) for each in found
        )

    for num in (2, 5, 9):
        half = num // 2
        settings = (
            ("half gain 10 points, one of the others is said to differ", [0.1] * half + [0] * (num - half), 0, gained),
            ("all gain the smallest gain, one is said to gain less", [margin] * num, 0, less),
            ("all lose the margin, one is said to be not worse", [-margin] * num, margin, passed),
        )
        for at, (words, gains, not_worse, false) in enumerate(settings):
            random = np.random.default_rng([num, tasks, at])
            rules = ComparisonRules(ScoreSpan(0, 1), None, True, "excluded", margin, not_worse or None)
            found = [false(measure_sides(drawn(gains, tasks, random), rules)) for _ in range(experiments)]
            yield records.share(f"{num} sides, {tasks:,} tasks: {words}", sum(found), experiments, "<= 7")


def passed(found: Sequence[Difference]) -> bool:
    """Return whether any side is shown to be not worse."""
    return any(bool(each.not_worse) for each in found)


def drawn(gains: Sequence[float], tasks: int, random: np.random.Generator) -> list[PairedSides]:
    """Return sides that gain so much beside one that passes half of its tasks, on independent tasks."""
    first, units = (random.random(tasks) < 0.5).astype(float), tuple(map(str, range(tasks)))
    pairs = []
    for number, gain in enumerate(gains, 1):
        other = random.random(tasks) < 0.5 + gain / 0.4
        second = np.where(random.random(tasks) < 0.6, first, other)
        outcomes = PairedOutcomes.of_one_seed(second[None], first[None], units)
        pairs.append(PairedSides(name_side(number), "A", outcomes, (Counter(), Counter()), None, None))
    return pairs


def speed(items: int = 3000, many: int = 1_000_000, rounds: int = 7) -> Iterator[Claim]:
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


CASES = {"levels": levels, "sides": sides, "speed": speed}

if __name__ == "__main__":
    cases.main(__file__, CASES)
