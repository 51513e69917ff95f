"""How often the verdict of `composer evaluate` is right: coverage of its intervals and frequencies of its verdicts.

    python benchmarks/levels.py [verdicts|start|planned|sizes|collapsed|healthy|pilots] [--experiments 1000]

Experiments are simulated with the planner's model of tasks and decided by the rule of `composer evaluate`: at kata's
operations (sampled, and as fixed strata) and families, at SWE-bench Lite's repositories (fixed, and sampled), at tasks
that are units themselves, six and three units, a low pass rate and four samples of a task, each with 1, 3 and 5
training seeds. Trainings spread with a standard deviation of 3 points; with one seed the interval is about these
checkpoints, so there they spread with 0. Fixed units have difficulties of their own, so that their true gain, by many
tasks of each, is not the one that tasks of any unit would have. tests/stages/evaluation/test_inference.py has six
layouts with fewer experiments.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator, Sequence
from dataclasses import replace

import cases
import numpy as np
from records import Claim, share
from scipy.optimize import brentq

from composer_stages.evaluation.design import Design, draw, outlook, simulated
from composer_stages.evaluation.difference import GAINS, Decision, Verdict
from composer_stages.evaluation.inference import MIN_SEEDS, PairedTest, shows
from composer_stages.evaluation.outcomes import START, find_collapsed, items_table
from composer_stages.evaluation.pilot import bootstrap, complete, fit_models, measure
from composer_stages.evaluation.planner import LARGEST_RANGE, NUM_PILOTS, PlanQuestion, validated_range
from composer_stages.evaluation.task_model import PILOT, Rates, TaskModel, task_model
from composer_stages.runs.kinds import Row

OPERATIONS = (17, 15, 13, 12, 11, 11, 10, 9, 8, 7, 5, 2)
LITE = (114, 77, 23, 23, 17, 16, 6, 6, 6, 5, 4, 3)
KATA = (9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1)
ALIKE = TaskModel(pass_rate=0.41, samples_differ=0.06, arms_differ=0.2, family_correlation=0.9, seed_sd=0.03)
UNLIKE = TaskModel(pass_rate=0.25, samples_differ=0.2, arms_differ=0.24, family_correlation=0.1, seed_sd=0.03)
LOW = TaskModel(pass_rate=0.1, samples_differ=0.08, arms_differ=0.12, family_correlation=0.3, seed_sd=0.03)
LAYOUTS = {
    "kata, 120 tasks in 12 sampled operations": (ALIKE, Design(OPERATIONS)),
    "kata, 360 tasks in 12 fixed operations": (ALIKE, Design((30,) * 12, fixed=True)),
    "kata, 120 tasks in 24 sampled families": (UNLIKE, Design(KATA)),
    "kata, 120 tasks in 24 sampled families, four samples": (UNLIKE, Design(KATA, samples=4)),
    "kata, 120 tasks in 24 sampled families, passed by 10 %": (LOW, Design(KATA)),
    "SWE-bench Lite, 300 tasks in 12 fixed repositories": (UNLIKE, Design(LITE, fixed=True)),
    "SWE-bench Lite, 300 tasks in 12 sampled repositories": (UNLIKE, Design(LITE)),
    "300 tasks, each a unit": (UNLIKE, Design((1,) * 300)),
    "120 tasks in six sampled units": (UNLIKE, Design((20,) * 6)),
    "120 tasks in three sampled units": (UNLIKE, Design((40,) * 3)),
}
TRUE_GAINS = (0.0, 0.1)


def true_mean(model: TaskModel, design: Design, gain: float) -> float:
    """Return the mean that an interval should cover: of fixed units by many tasks of each, else the gain itself."""
    if not design.fixed:
        return gain
    many = replace(design, sizes=tuple(400 * size for size in design.sizes), seeds=1)
    treatment, baseline = draw(replace(model, seed_sd=0.0), many, gain, 1, np.random.default_rng(5))
    return float((treatment - baseline).mean())


def coverage(model: TaskModel, design: Design, gain: float, truth: float, num: int) -> np.ndarray:
    """Return of each simulated experiment whether its interval holds the true mean."""
    random = np.random.default_rng(1)
    units = np.repeat(np.arange(len(design.sizes)), design.sizes)
    held = [
        ~PairedTest(*draw(model, design, gain, 250, random), units, fixed=design.fixed, num_flips=399).rejects(truth)
        for _ in range(num // 250)
    ]
    return np.concatenate(held)


def verdicts(experiments: int = 1000) -> Iterator[Claim]:
    """Coverage of the intervals; the frequencies of the verdicts are printed."""
    print("| layout | seeds | true gain | coverage | VALIDATED | PARTIAL | INVALIDATED | UNDERPOWERED |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (model, design) in LAYOUTS.items():
        for seeds in (1, 3, 5):
            shown = replace(model, seed_sd=0.0) if seeds == 1 else model
            for gain in TRUE_GAINS:
                played = replace(design, seeds=seeds)
                truth = true_mean(shown, played, gain)
                held = coverage(shown, played, gain, truth, experiments)
                found = outlook(shown, played, gain, experiments // 4).chances
                cells = " | ".join(f"{100 * chance:.1f} %" for chance in found.values())
                print(f"| {name} | {seeds} | {100 * truth:.1f} | {100 * held.mean():.1f} % | {cells} |", flush=True)
                claim = f"{name}, {seeds} seeds, a true gain of {100 * truth:.1f} points: coverage of 95 % intervals"
                yield share_of(held, claim, goal=">= 93.5")


STARTED = (
    "kata, 120 tasks in 12 sampled operations",
    "kata, 360 tasks in 12 fixed operations",
    "kata, 120 tasks in 24 sampled families",
    "300 tasks, each a unit",
)
"""Layouts in which trainings are compared with their start."""


def against_start(experiments: int = 1000) -> Iterator[Claim]:
    """How often a gain or a loss is found where trainings have none over their start, which is played once."""
    print("| layout | seeds | spread of trainings | a difference is found | VALIDATED or INVALIDATED |")
    print("| --- | --- | --- | --- | --- |")
    for name in STARTED:
        model, design = LAYOUTS[name]
        # Below three seeds a verdict is about these checkpoints, whose own gain spreads with the trainings.
        for seeds, spread in ((1, 0.0), (2, 0.0), (1, 0.03), (2, 0.03), (3, 0.03), (5, 0.03)):
            spreading = replace(model, seed_sd=spread)
            played = replace(design, seeds=seeds, one_baseline=True)
            truth = true_mean(spreading, played, 0.0)
            wrong = ~coverage(spreading, played, 0.0, truth, experiments)
            found = 100 * float(wrong.mean())
            of_training = found if seeds >= MIN_SEEDS else 0.0
            print(f"| {name} | {seeds} | {100 * spread:g} | {found:.1f} % | {of_training:.1f} % |", flush=True)
            of_checkpoints = bool(spread) and seeds < MIN_SEEDS
            who = f"{seeds} seeds{f' that vary by {100 * spread:g} points' if of_checkpoints else ''}"
            claim = f"{name}, {who} against their start without a gain: a difference is found"
            yield share_of(wrong, claim, goal=None if of_checkpoints else "<= 6.5")


PLANNED = {
    "120 tasks in 12 sampled operations, 3 seeds": (ALIKE, Design(OPERATIONS, seeds=3)),
    "360 tasks in 12 fixed operations, 24 seeds on 6 collections of pairs": (
        ALIKE,
        Design((30,) * 12, seeds=24, fixed=True, collection_of=tuple(seed // 4 for seed in range(24))),
    ),
    "120 tasks in 24 sampled families, 5 seeds": (UNLIKE, Design(KATA, seeds=5)),
    "the same against their start": (UNLIKE, Design(KATA, seeds=5, one_baseline=True)),
    "SWE-bench Lite, fixed repositories, 1 seed": (replace(UNLIKE, seed_sd=0.0), Design(LITE, fixed=True)),
    "300 tasks, each a unit, 3 seeds": (UNLIKE, Design((1,) * 300, seeds=3)),
}
"""Designs whose detectable gain is held against new experiments."""


def planned(experiments: int = 1000) -> Iterator[Claim]:
    """How often experiments find the gain that the planner says they find in 80 of 100, drawn anew at that gain."""
    for name, (model, design) in PLANNED.items():
        question = PlanQuestion(model, 0.02, 0.8, lambda design: 0)
        least = question.detectable(design)
        if least is None:
            raise RuntimeError(f"{name}: no gain is found by 80 % of such experiments")
        gain, at = least[0], question.model_at(least[0])
        tests = simulated(at, design, gain, experiments, seed=77)
        found = np.concatenate([np.isin(shows([test]), GAINS) for test in tests])
        yield share_of(found, f"{name}: experiments that find the {100 * gain:.1f} points that 80 % should find")


SIZED = {
    "120 tasks": (replace(UNLIKE, seed_sd=0.0), Design((1,) * 120), 0.05),
    "120 tasks, 3 seeds that vary by 3 points": (UNLIKE, Design((1,) * 120, seeds=3), 0.08),
    "120 tasks, 5 seeds that vary by 3 points": (UNLIKE, Design((1,) * 120, seeds=5), 0.05),
    "120 tasks in 24 families": (replace(UNLIKE, seed_sd=0.0), Design((5,) * 24), 0.08),
    "300 tasks that 97 % pass": (
        TaskModel(0.97, 0.02, 0.03, family_correlation=0.0, seed_sd=0.0),
        Design((1,) * 300),
        0.02,
    ),
}
"""Pilots from which `compare` says how many tasks and seeds find a difference."""


def sizes(experiments: int = 1000) -> Iterator[Claim]:
    """How often experiments of the size that such pilots name, at the median, find the difference that 80 % should."""
    for name, (model, design, gain) in SIZED.items():
        random, units = np.random.default_rng(0), np.repeat(np.arange(len(design.sizes)), design.sizes)
        pilots = (PairedTest(*draw(model, design, gain / 2, 1, random), units, num_flips=199) for _ in range(100))
        named = [pilot.size_for(gain) for pilot in pilots]
        tasks = float(np.median([size.tasks for size in named]))
        seeds = int(np.median([size.seeds or design.seeds for size in named]))
        each = design.sizes[0]
        grown = replace(design, sizes=(each,) * round(tasks / each), seeds=seeds)
        tests = simulated(model, grown, gain, experiments, seed=77)
        found = np.concatenate([np.isin(shows([test], 0.0), GAINS) for test in tests])
        size = f"{grown.num_tasks} tasks and {seeds} seeds" if design.seeds > 1 else f"{grown.num_tasks} tasks"
        yield share_of(
            found, f"pilots of {name} ask for {size}: experiments of this size that find {100 * gain:g} points"
        )


FAILING = 0.15
"""The share of trainings that collapse, and then pass nothing."""
MEAN = -0.005
"""The mean gain over all trainings then, those that collapse included."""


def collapses(experiments: int = 500) -> Iterator[Claim]:
    """Coverage where one training in seven collapses, and verdicts of a gain where the mean over trainings is -.5.

    Both also of the experiments that saw no collapse: the verdict says how frequent a failure these cannot rule out.
    """
    for name in ("kata, 360 tasks in 12 fixed operations", "300 tasks, each a unit"):
        model, design = LAYOUTS[name]
        units = np.repeat(np.arange(len(design.sizes)), design.sizes)
        many = replace(design, sizes=tuple(400 * size for size in design.sizes), seeds=1)

        def mean_of(gain: float, model: TaskModel = model, many: Design = many) -> float:
            treatment, baseline = draw(replace(model, seed_sd=0.0), many, gain, 1, np.random.default_rng(5))
            return float(((1 - FAILING) * treatment - baseline).mean())

        gain = float(brentq(lambda gain: mean_of(gain) - MEAN, 0.0, 0.19, xtol=1e-4))
        truth = mean_of(gain)
        for seeds in (3, 5, 8, 12, 18, 24):
            random, held, gained, seen = np.random.default_rng(2), [], [], []
            for _ in range(experiments // 100):
                arms = draw(model, replace(design, seeds=seeds), gain, 100, random)
                fell = random.random(arms[0].shape[:2]) < FAILING
                arms[0][fell] = 0.0
                test = PairedTest(*arms, units, fixed=design.fixed, num_flips=399)
                held.append(~test.rejects(truth))
                gained.append(shows([test]) == Decision.BETTER.value)
                seen.append(fell.any(1))
            covered, better, at_least_one = (np.concatenate(each) for each in (held, gained, seen))
            what = f"{name}, {seeds} seeds of which {100 * FAILING:g} % collapse, mean {100 * truth:.1f} points"
            yield share_of(covered, f"{what}: coverage of 95 % intervals")
            yield share_of(better, f"{what}: VALIDATED")
            yield share_of(covered[at_least_one], f"{what}, one seen: coverage of 95 % intervals")
            yield share_of(better[at_least_one], f"{what}, one seen: VALIDATED")


def healthy(experiments: int = 300) -> Iterator[Claim]:
    """How often a verdict names a training as collapsed where all are healthy and spread normally."""
    for rate, sd in ((0.2, 0.04), (0.05, 0.02)):
        model = TaskModel(pass_rate=rate, samples_differ=rate, arms_differ=rate, family_correlation=0.3, seed_sd=sd)
        for seeds in (3, 5, 24):
            trained, _ = draw(model, Design((30,) * 12, seeds=seeds), 0.0, experiments, np.random.default_rng(seeds))
            named = [
                bool(
                    find_collapsed(
                        items_table(
                            {"arm": "A", "train_seed": seed, "task_id": f"t{task}", "passed": passed > 0}
                            for (seed, task), passed in np.ndenumerate(passed_ST)
                        ),
                        "A",
                    )
                )
                for passed_ST in trained
            ]
            what = f"{seeds} healthy trainings pass {100 * rate:g} % of 360 tasks, sd {100 * sd:g} points"
            yield share_of(np.array(named), f"{what}: one is named as collapsed")


def share_of(found: np.ndarray, claim: str, goal: str | None = None) -> Claim:
    """Return the share of experiments as a claim."""
    return share(claim, int(found.sum()), len(found), goal)


PILOTS = {"6 families": (4,) * 6, "12 families": (4,) * 12, "24 families": KATA, "96 families": KATA * 4}


def pilots(pilots: int = 25) -> Iterator[Claim]:
    """How often a plan says that its pilot is too small to forecast, and how often its range holds the true chance.

    The pilot: a baseline's rollouts, four of each task; the plan: 24 families, 5 seeds, a gain of 12 points. The true
    chance is that at the rates which such a pilot measures; what it does not, a plan assumes.
    """
    gain, planned_design = 0.12, Design(KATA, seeds=5)

    def rates_of(rows: Sequence[Row]) -> Rates:
        return complete(measure(rows, "A", "B"), gain)

    rates = {name: (getattr(UNLIKE, name), PILOT) for name in ("pass_rate", "samples_differ", "family_correlation")}
    truth = outlook(task_model(complete(rates, gain)), planned_design, gain, 1000).chances[Verdict.VALIDATED]
    for name, sizes in PILOTS.items():
        said, inside = [], []
        for number in range(pilots):
            _, baseline = draw(UNLIKE, Design(sizes, samples=4), 0.0, 1, np.random.default_rng(number))
            families = np.repeat(np.arange(len(sizes)), sizes)
            rows = [
                {"arm": START, "train_seed": 0, "task_id": f"t{task}", "family": f"f{families[task]}", "unit": None}
                | {"sample_idx": sample, "passed": sample < round(4 * rate), "error_type": None}
                for task, rate in enumerate(baseline[0, 0])
                for sample in range(4)
            ]
            model, *models = fit_models((rows, *bootstrap(rows, NUM_PILOTS)), rates_of, gain)
            chance = outlook(model, planned_design, gain).chances[Verdict.VALIDATED]
            low, high = validated_range(chance, models, len(sizes), planned_design, gain) or (0.0, 1.0)
            said.append(high - low > LARGEST_RANGE)
            inside.append(low <= truth <= high)
        yield share_of(np.array(said), f"pilots of {name}, four rollouts a task: said to be too small to forecast")
        yield share_of(np.array(inside), f"pilots of {name}, four rollouts a task: the range holds the true chance")


CASES = {
    "verdicts": verdicts,
    "start": against_start,
    "planned": planned,
    "sizes": sizes,
    "collapsed": collapses,
    "healthy": healthy,
    "pilots": pilots,
}


if __name__ == "__main__":
    cases.main(__file__, CASES)
