"""Plan an evaluation before it is paid for (`composer evaluate --plan`): what would it show, and what is enough.

A pilot, settings and assumptions give the rates of a task model (`measure`, `complete`); the rule that decides is
simulated on a design (`draw`, `outlook`), on the design with twice as much of one thing, and on the cheapest design
that reaches the wanted power (`study_design`, `cheapest`). Costs are those of evaluation; training a seed costs extra.

In the task model a rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit
model), so that four measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on
one task differ, how often rollouts of the two arms differ, and how much of difficulty is shared within a family. The
gain of a training is normal about the true one.

A sampling unit is what tasks are drawn in, as the environment declares it: `unit` is short for it in this module.
Axis names as in `paired`: X experiments, S training seeds, T tasks, F families, U units.
"""

import functools
import textwrap
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations

import numpy as np
from pydantic import Field

from stages.envs.base import SamplingUnit
from stages.errors import UsageError
from stages.evaluation.arms import START, Item, failed, rollout_items, sampling_unit, without_twins
from stages.evaluation.comparison import gain_by_seed, outcomes
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import MIN_SEEDS, pair, rejects
from stages.evaluation.report import aligned, wrap
from stages.evaluation.stats import ALPHA, fewest_units, quantile
from stages.evaluation.verdict import INVALIDATED, MIN_GAIN, PARTIAL, UNDERPOWERED, VALIDATED
from stages.plurals import plural
from stages.runs.activity import doing
from stages.runs.kinds import EVAL_ITEM, Row
from stages.runs.run import Run
from stages.runs.settings import Settings

NUM_FLIPS = 399
NUM_EXPERIMENTS = 400
"""Simulated experiments per design."""
NUM_SEARCH = 200
"""Simulated experiments per design in the search for the cheapest one."""
BATCH_CELLS = 4_000_000
"""Outcomes in memory at once."""
BLOCK_CELLS = 30_000
"""Outcomes drawn at once: their probabilities stay in the cache of a core."""
SEEDS = (3, 4, 5, 6, 8, 10, 15, 20)
SAMPLES = (1, 4)
MOST_TASKS = 200_000

NUM_PILOTS, NUM_RESAMPLED = 40, 100
"""Bootstrap samples of a pilot, and simulated experiments for each: 4,000 in all, in seconds."""
BETWEEN = "between"
"""How often rollouts of two tasks of one unit differ: measured, and turned into `family_correlation` by `complete`."""

PILOT, ASSUMED, GIVEN = "pilot", "assumed", "given"
Rates = dict[str, tuple[float, str]]
"""A rate and its source (`PILOT`, `ASSUMED` or `GIVEN`), by the name of its field in `TaskModel`."""
VERDICTS = (VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED)


class Planning(Settings):
    """What `--plan` assumes. Rates that are not given come from the pilot behind --from, or are assumed."""

    gain: float = Field(default=0.02, gt=-1, lt=1)
    """The true difference in pass@1, a fraction."""
    power: float = Field(default=0.8, gt=0.5, lt=1)
    seeds: int = Field(default=1, gt=0)
    """Training seeds."""
    pass_rate: float | None = Field(default=None, gt=0, lt=1)
    """The baseline's pass rate, a fraction."""
    samples_differ: float | None = Field(default=None, gt=0, lt=1)
    """How often one of two rollouts of one model on one task passes and the other fails."""
    arms_differ: float | None = Field(default=None, gt=0, le=1)
    """How often a rollout of one arm passes and one of the other arm on the same task fails."""
    family_correlation: float | None = Field(default=None, ge=0, le=1)
    """The correlation of two tasks' difficulty within a family, or within what the environment declares instead."""
    seed_sd: float | None = Field(default=None, ge=0, lt=1)
    """The standard deviation of the gain from training seed to training seed, a fraction."""
    usd_per_rollout: float | None = Field(default=None, ge=0)


@dataclass(frozen=True)
class TaskModel:
    """Assumptions on tasks and training; rates and differences are fractions of one.

    pass_rate: that of the baseline. samples_differ: how often one of two rollouts of one model on one task passes and
    the other fails. arms_differ: the same for a rollout of each arm. family_correlation: that of two tasks' difficulty
    within a unit. seed_sd: the standard deviation of the gain from training to training.
    """

    pass_rate: float = 0.4
    samples_differ: float = 0.15
    arms_differ: float = 0.2
    family_correlation: float = 0.3
    seed_sd: float = 0.02


@dataclass(frozen=True)
class Design:
    """What is played: tasks by unit, rollouts per task, training seeds; `fixed`: units are fixed strata."""

    sizes: tuple[int, ...]
    samples: int = 1
    seeds: int = 1
    fixed: bool = False

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return sum(self.sizes)

    @property
    def num_flipped(self) -> int:
        """Return the number of units whose signs the test flips: tasks where units are fixed."""
        return self.num_tasks if self.fixed else len(self.sizes)


@dataclass(frozen=True)
class Outlook:
    """What a design would find: the probability of each verdict, and the variance of its estimate by source.

    unit_variance: that of units, or of tasks within fixed ones. seed_variance: that of the mean over seeds, as the rule
    would estimate it, the noise of single seeds included; 0 below three seeds.
    """

    chances: dict[str, float]
    unit_variance: float
    seed_variance: float


@dataclass(frozen=True)
class DesignLine:
    """One design and what it would find.

    `chances`: of each verdict, from `simulated` experiments. `validated_range`: the 10th and 90th percentile of the
    chance of VALIDATED over what the pilot leaves open, None without a pilot. `detectable`: about the gain that the
    design finds with the wanted power, None where its units are too few for any.
    """

    name: str
    tasks: int
    sampling_units: int
    samples: int
    seeds: int
    rollouts: int
    usd: float | None
    chances: Mapping[str, float]
    simulated: int
    false_gain: float | None
    detectable: float | None
    validated_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Study:
    """Everything that is printed; `rates` holds each rate of the task model and its source.

    `pilots`: the names of the runs that rates come from. `sampling_unit`: its noun. `add_first`: what to double, or the
    units where the test needs more of them; then `fewest_units` is how many it needs, else None.
    """

    gain: float
    power: float
    rates: Rates
    lines: tuple[DesignLine, ...]
    add_first: tuple[str, ...]
    enough: DesignLine | None
    sampling_unit: str = "family"
    fewest_units: int | None = None
    pilots: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanQuestion:
    """What the planner is asked: the task model, the true gain, the wanted power, the arms to play and their cost.

    `usd_per_rollout` is None where it is not known. `resampled`: the task models of the pilot's bootstrap samples.
    """

    model: TaskModel
    gain: float
    power: float
    arms: int
    usd_per_rollout: float | None = None
    resampled: tuple[TaskModel, ...] = ()

    def line(
        self, name: str, design: Design, num: int = NUM_EXPERIMENTS, null: bool = False, ranged: bool = False
    ) -> DesignLine:
        """Simulate one design.

        null: also how often it finds a gain that is not there. ranged: also under what the pilot leaves open.
        """
        with doing(f"simulating the design '{name}'"):
            found = outlook(self.model, design, self.gain, num)
            validated = [
                outlook(model, design, self.gain, NUM_RESAMPLED, seed).chances[VALIDATED]
                for seed, model in enumerate(self.resampled if ranged else ())
            ]
            none = outlook(self.without_gain, design, 0.0, num).chances if null else None
        low, high = np.quantile(validated, (0.1, 0.9)) if validated else (0.0, 0.0)
        rollouts = design.num_tasks * design.samples * design.seeds * self.arms
        return DesignLine(
            name=name,
            tasks=design.num_tasks,
            sampling_units=len(design.sizes),
            samples=design.samples,
            seeds=design.seeds,
            rollouts=rollouts,
            usd=None if self.usd_per_rollout is None else self.usd_per_rollout * rollouts,
            chances=found.chances,
            simulated=num,
            false_gain=none[VALIDATED] + none[PARTIAL] if none else None,
            detectable=self.detectable(found, design.seeds) if design.num_flipped >= fewest_units() else None,
            validated_range=(float(low), float(high)) if validated else None,
        )

    @property
    def without_gain(self) -> TaskModel:
        """Return the task model where the arms have one pass rate, at which they differ by chance less often."""
        most = chance_of_difference(self.model.pass_rate, self.model.pass_rate)
        return replace(self.model, arms_differ=min(self.model.arms_differ, most))

    def detectable(self, found: Outlook, seeds: int, times: float = 1.0) -> float:
        """Return about the gain found with the wanted power by `times` as many tasks.

        The limits of seeds and units add in squares.
        """
        lasting = min(self.model.seed_sd**2 / seeds, found.seed_variance) if seeds >= MIN_SEEDS else 0.0
        by_seed = lasting + (found.seed_variance - lasting) / times
        by_unit = found.unit_variance / times
        of_seeds = quantile(1 - ALPHA / 2, seeds - 1) if seeds >= MIN_SEEDS else 0.0
        limit: float = (of_seeds**2 * by_seed + quantile(1 - ALPHA / 2, 1e6) ** 2 * by_unit) ** 0.5
        return limit + quantile(self.power, 1e6) * float(by_seed + by_unit) ** 0.5


def study(
    pilots: Sequence[Run],
    asked: Planning,
    *,
    baseline: str,
    treatment: str,
    num_arms: int,
    unit_sizes: Sequence[int],
    samples: int,
    sampling: SamplingUnit,
    tell: Callable[[str, int, int], None],
) -> tuple[Row, str]:
    """Return what an evaluation of `num_arms` arms would find and cost, as JSON and as text.

    `unit_sizes`: the tasks of each unit. `tell` is called with what is counted, how many designs are simulated, and how
    many there are. Raises `BadInput` for a pilot without rollouts.
    """
    items: list[Row] = []
    for run in pilots:
        items += run.rows(EVAL_ITEM) if run.holds(EVAL_ITEM) else [item for _, item in rollout_items(run, START)]
    names = TaskModel.__annotations__
    given = {name: (getattr(asked, name), GIVEN) for name in names if getattr(asked, name) is not None}

    def rates_of(rows: Sequence[Item]) -> Rates:
        return complete({**measure(rows, baseline, treatment), **given}, asked.gain)

    def model_of(rates: Rates) -> TaskModel:
        return TaskModel(**{name: value for name, (value, _) in rates.items()})

    rates = rates_of(items)
    resampled = []
    # Models whose rates contradict the wanted gain (a pilot may resample to a pass rate near 1) are no model of it.
    for rows in bootstrap(items, NUM_PILOTS):
        with suppress(UsageError):
            model = model_of(rates_of(rows))
            latent_correlations(model, asked.gain)
            resampled.append(model)
    model, design = model_of(rates), Design(tuple(unit_sizes), samples, asked.seeds, sampling.fixed)
    costs = [item["cost_usd"] for item in items if item["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    question = PlanQuestion(model, asked.gain, asked.power, num_arms, price, tuple(resampled))
    found = study_design(question, design, rates, lambda done, total: tell("designs", done, total), sampling.noun)
    found = replace(found, pilots=tuple(f"{run.path.parent.name}/{run.path.name}" for run in pilots))
    return asdict(found), study_text(found)


def bootstrap(items: Sequence[Item], num: int) -> Iterator[list[Item]]:
    """Yield `num` pilots, each of as many units drawn from this pilot's with replacement; none of an empty one."""
    by_unit: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_unit[sampling_unit(item)].append(item)
    units, random = list(by_unit), np.random.default_rng(0)
    for _ in range(num if len(units) > 1 else 0):
        rows: list[Item] = []
        for copy, index in enumerate(random.integers(0, len(units), len(units))):
            # A unit that is drawn twice is two units, whose tasks are two tasks.
            tag = f"#{copy}"
            rows += [
                {**item, "unit": units[index] + tag, "task_id": item["task_id"] + tag} for item in by_unit[units[index]]
            ]
        yield rows


def measure(items: Sequence[Item], baseline: str, treatment: str) -> Rates:
    """Return the rates that a pilot gives: of the baseline, of the start where that was not played, or of all items.

    A pilot is any rollouts of the start model, or an earlier evaluation.
    """
    rows = [item for item in without_twins(list(items)) if not failed(item)]
    arms: dict[str, list[Item]] = defaultdict(list)
    for item in rows:
        arms[item["arm"]].append(item)
    of_one = arms.get(baseline) or arms.get(START) or rows
    if not of_one:
        return {}
    base = float(np.clip(np.mean([item["passed"] for item in of_one]), 0.5 / len(of_one), 1 - 0.5 / len(of_one)))
    rates: Rates = {"pass_rate": (base, PILOT)}
    differing = share_differing(of_one, lambda item: (item["train_seed"], item["task_id"]))
    if differing is not None:
        rates["samples_differ"] = (float(np.clip(differing, 0.01, 2 * base * (1 - base))), PILOT)
    between = share_differing(
        of_one, lambda item: (item["train_seed"], sampling_unit(item)), lambda item: item["task_id"]
    )
    if between is not None:
        rates[BETWEEN] = (between, PILOT)
    if found := outcomes(arms.get(treatment, []), arms.get(baseline, []), "passed"):
        a, b = found.treatment_ST, found.baseline_ST
        rates["arms_differ"] = (float(np.nanmean(a * (1 - b) + b * (1 - a))), PILOT)
        gains = list(gain_by_seed(arms[treatment], arms[baseline]).values())
        if len(gains) >= MIN_SEEDS:
            rates["seed_sd"] = (float(np.std(gains, ddof=1)), PILOT)
    return rates


def share_differing(
    items: Iterable[Item], key: Callable[[Item], Hashable], other: Callable[[Item], Hashable] | None = None
) -> float | None:
    """Return how often two rollouts with the same key differ, each key counting once; None without two of any.

    With `other`, only rollouts that differ in it are compared.
    """
    groups: dict[Hashable, list[tuple[Hashable, bool]]] = defaultdict(list)
    for item in items:
        groups[key(item)].append((other(item) if other else None, item["passed"]))
    shares = []
    for rows in groups.values():
        pairs = [a[1] != b[1] for a, b in combinations(rows, 2) if other is None or a[0] != b[0]]
        shares += [sum(pairs) / len(pairs)] if pairs else []
    return sum(shares) / len(shares) if shares else None


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
        least = abs(gain) + 1e-3
        arms_differ = float(np.clip(arms_differ, least, max(chance_of_difference(base[0], base[0] + gain), least)))
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


def chance_of_difference(one: float, other: float) -> float:
    """Return how often one of two independent outcomes with these rates passes and the other fails."""
    return one + other - 2 * one * other


def correlation_of(one: float, other: float, both: float) -> float:
    """Return the latent correlation, 0..1, under which two outcomes with rates `one` and `other` pass both so often.

    The nearest correlation where none gives `both`.
    """
    from scipy.stats import multivariate_normal, norm

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if middle >= 1 - 1e-9:
            chance = min(one, other)
        else:
            covariance = [[1.0, middle], [middle, 1.0]]
            chance = float(multivariate_normal.cdf([norm.ppf(one), norm.ppf(other)], cov=covariance))
        low, high = (middle, high) if chance < both else (low, middle)
    return high


@functools.cache
def latent_correlations(model: TaskModel, gain: float) -> tuple[float, float]:
    """Return the latent correlations of two rollouts of one task, and of the arms' difficulties.

    Raises `UsageError` where the rates contradict each other.
    """
    reached = model.pass_rate + gain
    if not (0 < model.pass_rate < 1 and 0 < reached < 1):
        raise UsageError(
            f"A gain of {gain:g} at a pass rate of {model.pass_rate:g} leads to {reached:g}, and rates lie between 0 "
            "and 1. Plan with another planning.gain or planning.pass_rate."
        )
    same, chance = (
        chance_of_difference(model.pass_rate, model.pass_rate),
        chance_of_difference(model.pass_rate, reached),
    )
    if not 0 < model.samples_differ <= same + 1e-9:
        raise UsageError(
            f"Two rollouts of one model cannot differ in {model.samples_differ:g} of the tasks: at a pass rate of "
            f"{model.pass_rate:g} it is, by chance alone, at most {same:.3g}. Plan with another "
            "planning.samples_differ."
        )
    if not abs(gain) <= model.arms_differ <= chance + 1e-9:
        raise UsageError(
            f"Rollouts of the two arms cannot differ in {model.arms_differ:g} of the tasks: at pass rates of "
            f"{model.pass_rate:g} and {reached:g} it is at least {abs(gain):g} and, by chance alone, at most "
            f"{chance:.3g}. Plan with another planning.arms_differ."
        )
    same_task = correlation_of(model.pass_rate, model.pass_rate, model.pass_rate - model.samples_differ / 2)
    across = correlation_of(model.pass_rate, reached, (model.pass_rate + reached - model.arms_differ) / 2)
    return same_task, min(across / max(same_task, 1e-9), 1.0)


def draw(
    model: TaskModel, design: Design, gain: float, num: int, random: np.random.Generator, strata: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return simulated [X, S, T] outcomes of treatment and baseline, means over samples.

    Fixed units are the same in all experiments: their difficulties come from the seed `strata`.
    """
    from scipy.special import ndtr, ndtri

    (same_task, r), share = latent_correlations(model, gain), model.family_correlation
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    num_models, num_families = 1 if design.fixed else num, len(design.sizes)
    of_families = np.random.default_rng(strata) if design.fixed else random
    family_2XF = of_families.normal(size=(2, num_models, num_families))
    own_2XT = random.normal(size=(2, num, len(family_T)))
    z_2XT = np.sqrt(share) * family_2XF[:, :, family_T] + np.sqrt(1 - share) * own_2XT
    difficulty_XT = (z_2XT[0], r * z_2XT[0] + np.sqrt(1 - r**2) * z_2XT[1])
    rates_XS = np.full((2, num, design.seeds), model.pass_rate)
    rates_XS[1] = np.clip(
        model.pass_rate + gain + model.seed_sd * random.normal(size=rates_XS[1].shape), 1e-4, 1 - 1e-4
    )
    arms = []
    block = max(1, BLOCK_CELLS // (design.seeds * len(family_T)))
    for rate_XS, z_XT in zip(rates_XS, difficulty_XT, strict=True):
        passed_XST = np.empty((num, design.seeds, len(family_T)))
        threshold_XS, shared_XT = ndtri(rate_XS), np.sqrt(same_task) * z_XT
        for x in range(0, num, block):  # draws what one call for all experiments would draw
            p_XST = threshold_XS[x : x + block, :, None] + shared_XT[x : x + block, None, :]
            p_XST /= np.sqrt(max(1 - same_task, 1e-9))
            passed_XST[x : x + block] = binomial(design.samples, ndtr(p_XST, out=p_XST), random)
        passed_XST /= design.samples
        arms.append(passed_XST)
    return arms[1], arms[0]


def binomial(n: int, p: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return `random.binomial(n, p)` for n p below 30 and p above 0: its numbers, in a third of its time.

    By inversion, as numpy draws it, but for all p at once: numpy begins anew for each p, and all of them differ here.
    """
    upper, left = p > 0.5, random.random(p.shape)
    rare = np.where(upper, 1 - p, p)
    odds, chance, num = rare / (1 - rare), (1 - rare) ** n, np.zeros(p.shape, dtype=np.int16)
    beyond = left > chance
    for k in range(1, n + 1):
        num += beyond
        if k < n:
            left -= chance
            chance *= (n - k + 1) / k * odds
            beyond &= left > chance
    return np.where(upper, n - num, num)


def outlook(
    model: TaskModel,
    design: Design,
    gain: float,
    num: int = NUM_EXPERIMENTS,
    seed: int = 0,
    num_flips: int = NUM_FLIPS,
) -> Outlook:
    """Simulate a design at a true gain `num` times, by the rule that decides, without lost rollouts and subsets."""
    random = np.random.default_rng(seed)
    unit_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    signs_RU = draw_signs(design.num_flipped, random, num_flips)
    counts = dict.fromkeys((VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED), 0)
    means, errors = [], []
    step = max(1, min(num, BATCH_CELLS // (design.num_tasks * design.seeds)))
    for start in range(0, num, step):
        one = pair(*draw(model, design, gain, min(step, num - start), random), unit_T, fixed=design.fixed)
        moved_X, short_X = rejects(one, 0.0, signs_RU), rejects(one, MIN_GAIN, signs_RU) & (one.mean_X < MIN_GAIN)
        gained_X = moved_X & (one.mean_X > 0)
        # Below three training seeds neither direction is more than about these checkpoints.
        invalid_X = ~gained_X & (moved_X | short_X) & (design.seeds >= MIN_SEEDS)
        counts[VALIDATED if design.seeds >= MIN_SEEDS else PARTIAL] += int(gained_X.sum())
        counts[INVALIDATED] += int(invalid_X.sum())
        counts[UNDERPOWERED] += int((~gained_X & ~invalid_X).sum())
        means.append(one.mean_X)
        errors.append(np.zeros(1) if one.top_error_X is None else one.top_error_X)
    by_seed = float((np.concatenate(errors) ** 2).mean())
    by_unit = max(float(np.concatenate(means).var()) - by_seed, 0.0)
    return Outlook({decision: count / num for decision, count in counts.items()}, by_unit, by_seed)


def study_design(
    question: PlanQuestion,
    design: Design,
    rates: Rates,
    ready: Callable[[int, int], None] | None = None,
    unit: str = "family",
) -> Study:
    """Study a design: as it is, with enough seeds for a verdict, with twice of each, and what is enough.

    `unit` is the noun of a sampling unit. `ready` is called with the number of designs that are simulated, and that of
    all.
    """
    start = replace(design, seeds=max(design.seeds, MIN_SEEDS))
    asked = {"as asked": design}
    if start != design:
        asked[f"with {start.seeds} training seeds"] = start
    more = {
        "twice the seeds": replace(start, seeds=2 * start.seeds),
        f"twice the tasks of each {unit}": replace(start, sizes=tuple(2 * size for size in start.sizes)),
        "twice the samples": replace(start, samples=2 * start.samples),
    }
    if not start.fixed:
        more = {f"twice the {plural(unit)}": replace(start, sizes=start.sizes * 2), **more}
    lines = list[DesignLine]()
    for name, each in (asked | more).items():
        lines.append(question.line(name, each, null=name in asked, ranged=True))
        if ready:
            ready(len(lines), len(asked) + len(more) + 1)
    doubled = lines[len(asked) :]
    order = tuple(line.name for line in sorted(doubled, key=lambda line: line.detectable or float("inf")))
    least = fewest_units()
    if too_few := start.num_flipped < least:  # nothing else helps a design that cannot reject
        order = ("tasks" if start.fixed else plural(unit),)
    enough = cheapest(question, start)
    fewest = least if too_few else None
    return Study(question.gain, question.power, rates, tuple(lines), order, enough, unit, fewest)


def cheapest(question: PlanQuestion, start: Design) -> DesignLine | None:
    """Return the design of fewest rollouts that reaches the wanted power, simulated; None when none is found.

    Tasks are added in new units, or in the same ones where these are fixed. The size is found from the variances of
    the smallest design and grown until the simulation agrees.
    """
    candidates: list[tuple[int, Design]] = []
    for seeds in SEEDS:
        for samples in SAMPLES:
            small = replace(start, seeds=seeds, samples=samples)
            with doing(f"simulating {seeds} seeds and {samples} samples, in search of the cheapest design"):
                found = outlook(question.model, small, question.gain, NUM_SEARCH)
            sizes = [1.0]
            while sizes[-1] * small.num_tasks < MOST_TASKS:
                sizes.append(sizes[-1] * 1.25)
            times = next((size for size in sizes if question.detectable(found, seeds, size) <= question.gain), None)
            if times is not None:
                design = grown(small, times)
                candidates.append((design.num_tasks * samples * seeds, design))
    # Fewest rollouts first: the first design that the simulation confirms, grown at most twice, is the cheapest.
    for _, design in sorted(candidates, key=lambda candidate: candidate[0]):
        for step in range(3):
            line = question.line("enough", grown(design, 1.3**step), num=NUM_SEARCH)
            if line.chances[VALIDATED] >= question.power:
                return line
    return None


def grown(design: Design, times: float) -> Design:
    """Return the design with `times` as many units, or tasks of each unit where units are fixed."""
    if design.fixed:
        return replace(design, sizes=tuple(max(1, round(times * size)) for size in design.sizes))
    whole = int(times)
    rest = round((times - whole) * len(design.sizes))
    step = len(design.sizes) / max(rest, 1)
    return replace(design, sizes=design.sizes * whole + tuple(design.sizes[int(i * step)] for i in range(rest)))


def with_error(share: float, num: int) -> str:
    """Return a simulated share in per cent with its Monte-Carlo standard error: "83 ± 2".

    Of none or all in `num` experiments the error is that of the rule of succession, (n + 1) / (N + 2).
    """
    smoothed = (share * num + 1) / (num + 2)
    return f"{100 * share:.0f} ± {100 * (smoothed * (1 - smoothed) / num) ** 0.5:.1f}"


def study_text(found: Study) -> str:
    """Return the study for a terminal of 120 columns: the rates, and a column for each design."""
    lines = [f"A true gain of {100 * found.gain:g} points, {100 * found.power:g} % power wanted, and these rates:", ""]
    lines += aligned([("rate", "value", "source", "setting"), *rate_cells(found)])
    lines += [f"pilot: {name}" for name in found.pilots]
    lines += [
        "",
        *aligned(design_cells(found), right=True),
        "",
        *(line for remark in remarks(found) for line in wrap(remark)),
    ]
    return "\n".join(lines)


def rate_cells(found: Study) -> list[tuple[str, ...]]:
    """Return each rate in words, its value, its source and the setting that changes it."""
    words = {
        "pass_rate": "pass rate of the baseline",
        "samples_differ": "two rollouts of one model on one task differ (one passes, one fails)",
        "arms_differ": "rollouts of the two arms on one task differ",
        "family_correlation": f"correlation of difficulty between tasks of one {found.sampling_unit}",
        "seed_sd": "standard deviation of the gain between training seeds",
    }
    values = {name: f"{100 * value:.3g} %" for name, (value, _) in found.rates.items()}
    if "family_correlation" in values:
        values["family_correlation"] = f"{found.rates['family_correlation'][0]:.2f}"
    if "seed_sd" in values:
        values["seed_sd"] = f"{100 * found.rates['seed_sd'][0]:.3g} points"
    return [(words[name], values[name], source, f"planning.{name}") for name, (_, source) in found.rates.items()]


def design_cells(found: Study) -> list[tuple[str, ...]]:
    """Return the designs, a column for each: its name over several lines, its size, and what it would find."""
    lines = [*found.lines, *([found.enough] if found.enough else [])]
    heads = [textwrap.wrap(line.name, 10) for line in lines]
    height = max(map(len, heads))
    padded = [[""] * (height - len(head)) + head for head in heads]
    rows: list[tuple[str, list[str]]] = [("", list(words)) for words in zip(*padded, strict=True)]
    rows += [
        ("tasks", [f"{line.tasks:,}" for line in lines]),
        (f"{plural(found.sampling_unit)} of these tasks", [f"{line.sampling_units:,}" for line in lines]),
        ("samples (rollouts of a task by a model)", [f"{line.samples}" for line in lines]),
        ("training seeds of each arm", [f"{line.seeds}" for line in lines]),
        ("rollouts, all arms", [f"{line.rollouts:,}" for line in lines]),
    ]
    if any(line.usd for line in lines):
        rows.append(("cost of these rollouts, USD", [shown(line.usd, "{:,.2f}") for line in lines]))
    for name in VERDICTS:
        rows.append((f"chance of {name}, %", [with_error(line.chances[name], line.simulated) for line in lines]))
        if name == VALIDATED and found.pilots:
            ranges = [line.validated_range for line in lines]
            cells = [f"{100 * both[0]:.0f} to {100 * both[1]:.0f}" if both else "-" for both in ranges]
            rows.append(("  over what the pilot leaves open, %", cells))
    false = [None if line.false_gain is None else with_error(line.false_gain, line.simulated) for line in lines]
    rows += [
        ("chance of a gain where there is none, %", [cell or "-" for cell in false]),
        (
            f"smallest gain found with {100 * found.power:g} % power, points",
            ["none" if line.detectable is None else f"{100 * line.detectable:.1f}" for line in lines],
        ),
    ]
    return [(label, *cells) for label, cells in rows]


def shown(value: float | None, form: str) -> str:
    """Return a number in this format, "-" for none."""
    return "-" if value is None else form.format(value)


def remarks(found: Study) -> list[str]:
    """Return what to add first, what is enough, and how to read the table, a sentence or two each."""
    gain, power = f"{100 * found.gain:g} points", f"{100 * found.power:g} %"
    first = f"What to add first: {', then '.join(found.add_first)}."
    if (least := found.fewest_units) is not None:
        first += f" With fewer than {least} the test cannot reject, however large the gain. {least} are the minimum "
        first += "for a test and no recommendation: what the wanted gain takes is in the column `enough`."
    enough = (
        f"`enough` is the design of fewest rollouts that was found to reach {power} power for {gain}."
        if found.enough
        else f"No design of up to {MOST_TASKS:,} tasks and {SEEDS[-1]} training seeds reaches {power} power for {gain}."
    )
    of_pilot = (
        "What the pilot leaves open: the 10th to 90th percentile of that chance over bootstrap samples of the pilot."
        if found.pilots
        else "With `--from RUN` a pilot gives rates: rollouts of the start model, or an earlier evaluation."
    )
    return [
        first,
        enough,
        of_pilot,
        "±: the standard error of the simulation.",
        "Rollouts and their cost are those of the evaluation; training another seed costs extra.",
    ]
