"""Plan an evaluation before it is paid for (`composer evaluate --plan`): what would it show, and what is enough.

A pilot, settings and assumptions give the rates of a task model (`measure`, `complete`); the rule that decides is
simulated on a design (`draw`, `outlook`), on the design with twice as much of one thing, and on the cheapest design
that reaches the wanted power (`study_design`, `cheapest`). Costs are those of evaluation; training a seed costs extra.

In the task model a rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit
model), so that four measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on
one task differ, how often rollouts of the two arms differ, and how much of difficulty is shared within a family. The
gain of a training is normal about the true one.

Axis names as in `paired`: X experiments, S training seeds, T tasks, F families, U units.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations

import numpy as np
from pydantic import Field

from stages.envs.base import SamplingUnit
from stages.errors import UsageError
from stages.evaluation.arms import START, Item, evaluated_items, failed, rollout_items, sampling_unit, without_twins
from stages.evaluation.comparison import gain_by_seed, outcomes
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import MIN_SEEDS, pair, rejects
from stages.evaluation.stats import ALPHA, fewest_units, plural, quantile
from stages.evaluation.verdict import INVALIDATED, MIN_GAIN, PARTIAL, UNDERPOWERED, VALIDATED
from stages.runs.activity import doing
from stages.runs.artifact import Run
from stages.runs.config import Settings
from stages.runs.records import EVAL_ITEM, Row

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
"""How often rollouts of two tasks of one unit differ: measured, and turned into `family_share` by `complete`."""

PILOT, ASSUMED, GIVEN = "pilot", "assumed", "given"
Rates = dict[str, tuple[float, str]]
"""A rate and its source (`PILOT`, `ASSUMED` or `GIVEN`), by the name of its field in `TaskModel`."""
VERDICTS = (VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED)
HEAD = (
    *("design", "tasks", "units", "smp.", "seeds", "rollouts", "USD"),
    *("VALID.", "pilot", "PART.", "INVAL.", "UNDERP.", "from"),
)


class Planning(Settings):
    """What `--plan` assumes. Rates that are not given come from the pilot behind --from, or are assumed."""

    gain: float = Field(0.02, gt=-1, lt=1)
    """The true difference in pass@1, a fraction."""
    power: float = Field(0.8, gt=0.5, lt=1)
    seeds: int = Field(1, gt=0)
    """Training seeds."""
    base: float | None = Field(None, gt=0, lt=1)
    """The baseline's pass rate."""
    repeat: float | None = Field(None, gt=0, lt=1)
    """How often two rollouts of one model on one task differ."""
    discordance: float | None = Field(None, gt=0, le=1)
    """How often rollouts of the two arms on one task differ."""
    family_share: float | None = Field(None, ge=0, le=1)
    """The part of a task's difficulty that its sampling unit has: its family, or what the environment declares."""
    seed_spread: float | None = Field(None, ge=0, lt=1)
    """The standard deviation of the gain from training to training."""
    usd_per_rollout: float | None = Field(None, ge=0)


@dataclass(frozen=True)
class TaskModel:
    """Assumptions on tasks and training; rates and differences are fractions of one.

    base: the baseline's pass rate. repeat: how often two rollouts of one model on one task differ. discordance: how
    often one of each arm do. family_share: the part of a task's difficulty that its unit has. seed_spread: the standard
    deviation of the gain from training to training.
    """

    base: float = 0.4
    repeat: float = 0.15
    discordance: float = 0.2
    family_share: float = 0.3
    seed_spread: float = 0.02


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
    units: int
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
    """Everything that is printed; `assumed` holds each rate of the task model and its source; `unit` is the noun.

    `too_few`: why no gain can be found, where the test needs more units; empty where it has them.
    """

    gain: float
    power: float
    assumed: Rates
    lines: tuple[DesignLine, ...]
    add_first: tuple[str, ...]
    enough: DesignLine | None
    unit: str = "family"
    too_few: str = ""


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
            none = outlook(self.model, design, 0.0, num).chances if null else None
        low, high = np.quantile(validated, (0.1, 0.9)) if validated else (0.0, 0.0)
        rollouts = design.num_tasks * design.samples * design.seeds * self.arms
        return DesignLine(
            name=name,
            tasks=design.num_tasks,
            units=len(design.sizes),
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

    def detectable(self, found: Outlook, seeds: int, times: float = 1.0) -> float:
        """Return about the gain found with the wanted power by `times` as many tasks.

        The limits of seeds and units add in squares.
        """
        lasting = min(self.model.seed_spread**2 / seeds, found.seed_variance) if seeds >= MIN_SEEDS else 0.0
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

    `unit_sizes`: the tasks of each unit. `tell` is called with each design in words as it is simulated, the number of
    those that are, and that of all. Raises `BadInput` for a pilot without rollouts.
    """
    items: list[Row] = []
    for run in pilots:
        items += evaluated_items(run) if run.holds(EVAL_ITEM) else [item for _, item in rollout_items(run, START)]
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
    found = study_design(
        question,
        design,
        rates,
        lambda line, done, total: tell(line_in_words(line, sampling.noun), done, total),
        sampling.noun,
    )
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
    rates: Rates = {"base": (base, PILOT)}
    differing = share_differing(of_one, lambda item: (item["train_seed"], item["task_id"]))
    if differing is not None:
        rates["repeat"] = (float(np.clip(differing, 0.01, 2 * base * (1 - base))), PILOT)
    between = share_differing(
        of_one, lambda item: (item["train_seed"], sampling_unit(item)), lambda item: item["task_id"]
    )
    if between is not None:
        rates[BETWEEN] = (between, PILOT)
    if found := outcomes(arms.get(treatment, []), arms.get(baseline, []), "passed"):
        a, b = found.treatment_ST, found.baseline_ST
        rates["discordance"] = (float(np.nanmean(a * (1 - b) + b * (1 - a))), PILOT)
        gains = list(gain_by_seed(arms[treatment], arms[baseline]).values())
        if len(gains) >= MIN_SEEDS:
            rates["seed_spread"] = (float(np.std(gains, ddof=1)), PILOT)
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
    base = rates.get("base", (default.base, ASSUMED))
    chance = base[0] + (base[0] + gain) - 2 * base[0] * (base[0] + gain)
    known = rates.get("discordance", (1.25 * rates["repeat"][0] + abs(gain) if "repeat" in rates else None, ASSUMED))
    least, most = abs(gain) + 1e-3, max(chance, abs(gain) + 1e-3)
    discordance = float(np.clip(default.discordance if known[0] is None else known[0], least, most))
    repeat = rates.get("repeat", (min(default.repeat, 0.8 * discordance), ASSUMED))
    share = rates.get("family_share", (default.family_share, ASSUMED))
    if BETWEEN in rates and "family_share" not in rates:
        # Without repeats in the pilot the share rests on an assumed rate of repeats, but not on nothing.
        same_task = correlation_of(base[0], base[0], base[0] - min(repeat[0], 2 * base[0] * (1 - base[0])) / 2)
        same_unit = correlation_of(base[0], base[0], base[0] - rates[BETWEEN][0] / 2)
        share = (float(np.clip(same_unit / max(same_task, 1e-6), 0, 1)), PILOT)
    return {
        "base": base,
        "repeat": repeat,
        "discordance": (discordance, known[1]),
        "family_share": share,
        "seed_spread": rates.get("seed_spread", (default.seed_spread, ASSUMED)),
    }


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
    reached = model.base + gain
    if not (0 < model.base < 1 and 0 < reached < 1):
        raise UsageError(
            f"A gain of {gain:g} at a pass rate of {model.base:g} leads to {reached:g}, and rates lie between 0 and 1. "
            "Plan with another planning.gain or planning.base."
        )
    chance = model.base + reached - 2 * model.base * reached
    if not (model.repeat > 0 and abs(gain) <= model.discordance <= chance + 1e-9):
        raise UsageError(
            f"Rollouts of the two arms cannot differ in {model.discordance:g} of the tasks: at pass rates of "
            f"{model.base:g} and {reached:g} it is at least {abs(gain):g} and, by chance alone, at most {chance:.3g}. "
            "Plan with another planning.discordance."
        )
    same = correlation_of(model.base, model.base, model.base - model.repeat / 2)
    across = correlation_of(model.base, reached, (model.base + reached - model.discordance) / 2)
    return same, min(across / max(same, 1e-9), 1.0)


def draw(
    model: TaskModel, design: Design, gain: float, num: int, random: np.random.Generator, strata: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return simulated [X, S, T] outcomes of treatment and baseline, means over samples.

    Fixed units are the same in all experiments: their difficulties come from the seed `strata`.
    """
    from scipy.special import ndtr, ndtri

    (same_task, r), share = latent_correlations(model, gain), model.family_share
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    num_models, num_families = 1 if design.fixed else num, len(design.sizes)
    of_families = np.random.default_rng(strata) if design.fixed else random
    family_2XF = of_families.normal(size=(2, num_models, num_families))
    own_2XT = random.normal(size=(2, num, len(family_T)))
    z_2XT = np.sqrt(share) * family_2XF[:, :, family_T] + np.sqrt(1 - share) * own_2XT
    difficulty_XT = (z_2XT[0], r * z_2XT[0] + np.sqrt(1 - r**2) * z_2XT[1])
    rates_XS = np.full((2, num, design.seeds), model.base)
    rates_XS[1] = np.clip(model.base + gain + model.seed_spread * random.normal(size=rates_XS[1].shape), 1e-4, 1 - 1e-4)
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
    assumed: Rates,
    ready: Callable[[DesignLine, int, int], None] | None = None,
    unit: str = "family",
) -> Study:
    """Study a design: as it is, with enough seeds for a verdict, with twice of each, and what is enough.

    `unit` is the noun of a sampling unit. `ready` is called with each line as it is simulated, the number of those that
    are, and that of all.
    """
    start = replace(design, seeds=max(design.seeds, MIN_SEEDS))
    asked = {"as asked": design}
    if start != design:
        asked[f"with {start.seeds} training seeds"] = start
    more = {
        "twice the seeds": replace(start, seeds=2 * start.seeds),
        "twice the tasks, units as they are": replace(start, sizes=tuple(2 * size for size in start.sizes)),
        "twice the samples": replace(start, samples=2 * start.samples),
    }
    if not start.fixed:
        more = {"twice the units": replace(start, sizes=start.sizes * 2), **more}
    lines = list[DesignLine]()
    for name, each in (asked | more).items():
        lines.append(question.line(name, each, null=name in asked, ranged=True))
        if ready:
            ready(lines[-1], len(lines), len(asked) + len(more) + 1)
    doubled = lines[len(asked) :]
    order = tuple(line.name for line in sorted(doubled, key=lambda line: line.detectable or float("inf")))
    too_few, flipped = "", "tasks" if start.fixed else plural(unit)
    if start.num_flipped < (least := fewest_units()):  # nothing else helps a design that cannot reject
        order = (f"{flipped} until there are {least}",)
        too_few = f"{start.num_flipped} {flipped} cannot show anything: the test can reject from {least} on."
    enough = cheapest(question, start)
    return Study(question.gain, question.power, assumed, tuple(lines), order, enough, unit, too_few)


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


def line_in_words(line: DesignLine, unit: str) -> str:
    """Return a simulated design and the chances of its verdicts, in one line."""
    size = f"{line.tasks} tasks in {line.units} {plural(unit)}, samples {line.samples}, seeds {line.seeds}"
    chances = ", ".join(f"{name} {100 * line.chances[name]:.0f} %" for name in VERDICTS if line.chances[name] > 0.005)
    found = "finds no gain" if line.detectable is None else f"finds gains from about {100 * line.detectable:.1f} points"
    return f"{line.name} ({size}): {chances}; {found}"


def study_text(found: Study) -> str:
    """Return the study for a terminal."""
    from tabulate import tabulate

    cells = []
    for line in (*found.lines, *([found.enough] if found.enough else [])):
        usd = "-" if line.usd is None else f"{line.usd:,.2f}"
        chances = [with_error(line.chances[name], line.simulated) for name in VERDICTS]
        low, high = line.validated_range or (None, None)
        ranged = "-" if low is None or high is None else f"{100 * low:.0f} to {100 * high:.0f}"
        size = (line.tasks, line.units, line.samples, line.seeds, f"{line.rollouts:,}")
        detectable = "-" if line.detectable is None else f"{100 * line.detectable:.1f}"
        cells.append((line.name, *size, usd, chances[0], ranged, *chances[1:], detectable))
    rates = ", ".join(f"{name} {value:.3g} ({source})" for name, (value, source) in found.assumed.items())
    null = [line for line in found.lines if line.false_gain is not None]
    false_gains = "; ".join(f"{line.name} {with_error(line.false_gain or 0, line.simulated)} %" for line in null)
    enough = (
        "The last line is the cheapest design found that reaches it."
        if found.enough
        else f"No design of up to {MOST_TASKS:,} tasks and {SEEDS[-1]} training seeds reaches it."
    )
    return "\n".join(
        [
            f"A true gain of {100 * found.gain:g} points, {100 * found.power:g} % power wanted. Assumed: {rates}.",
            "",
            tabulate(cells, HEAD, tablefmt="plain", disable_numparse=True),
            "",
            "Chances of each verdict are in %, with the standard error of the simulation; `pilot` is the 10th to 90th "
            "percentile of VALID. over what the pilot leaves open, - without one.",
            f"`from`: about the gain, in points, that the design finds with {100 * found.power:g} % power. {enough}",
            *(["-: no gain can be found with this design.", found.too_few] if found.too_few else []),
            f"Found where there is no gain: {false_gains}.",
            f"What to add first: {', then '.join(found.add_first)}.",
            "Rollouts and costs are those of evaluation, all arms; training a seed costs extra.",
        ]
    )
