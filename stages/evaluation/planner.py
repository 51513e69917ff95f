"""What an experiment would show, before it is paid for: `composer evaluate --plan`.

The rule that decides is simulated on a design, on that design with twice as much of one thing, and on the cheapest
design that reaches the wanted power. Costs are those of evaluation; what training a seed costs comes on top.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from pydantic import Field

from stages.errors import UsageError
from stages.evaluation.arms import START, Item, failed, of_start, without_twins
from stages.evaluation.comparison import gain_by_seed, outcomes
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import MIN_SEEDS, pair, rejects
from stages.evaluation.stats import ALPHA, quantile
from stages.evaluation.verdict import INVALIDATED, MIN_GAIN, PARTIAL, UNDERPOWERED, VALIDATED
from stages.runs.artifact import Run
from stages.runs.config import Settings
from stages.runs.records import EVAL_ITEM, Row

# ---- planning
# What `evaluate --plan` assumes and asks, and its answer, as JSON and as text.


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
    """The part of a task's difficulty that its family has."""
    seed_spread: float | None = Field(None, ge=0, lt=1)
    """The standard deviation of the gain from training to training."""
    usd_per_rollout: float | None = Field(None, ge=0)


def study(
    pilots: Sequence[Run],
    asked: Planning,
    *,
    baseline: str,
    treatment: str,
    num_arms: int,
    family_sizes: Sequence[int],
    samples: int,
    fixed: bool,
) -> tuple[Row, str]:
    """What an evaluation of `num_arms` arms would find and cost; `BadInput` for a pilot without rollouts.

    `family_sizes`: the tasks of each family. `fixed`: families are fixed strata.
    """
    items = [item for run in pilots for item in (run.rows(EVAL_ITEM) if run.holds(EVAL_ITEM) else of_start(run))]
    given = {name: (getattr(asked, name), GIVEN) for name in World.__annotations__ if getattr(asked, name) is not None}
    rates = complete({**measure(items, baseline, treatment), **given}, asked.gain)
    world = World(**{name: value for name, (value, _) in rates.items()})
    design = Design(tuple(family_sizes), samples, asked.seeds, fixed)
    costs = [item["cost_usd"] for item in items if item["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    found = planner_study(Question(world, asked.gain, asked.power, num_arms, Price(price)), design, rates)
    return asdict(found), text(found)


# ---- simulation
# Experiments that have not been run: outcomes of two arms drawn from a model of tasks, and what would be decided.
#
# A rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit model), so that four
# measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on one task differ,
# how
# often rollouts of the two arms differ, and how much of difficulty is shared within a family. The gain of a
# training is
# normal about the true one.
#
# Axis names as in `paired`: X experiments, S training seeds, T tasks, F families, U units.

NUM_FLIPS = 399
BATCH_CELLS = 4_000_000


@dataclass(frozen=True)
class World:
    """What is assumed of tasks and training; rates and differences are fractions of one.

    base: the baseline's pass rate. repeat: how often two rollouts of one model on one task differ. discordance: how
    often one of each arm do. family_share: the part of a task's difficulty that its family has. seed_spread: the
    standard deviation of the gain from training to training.
    """

    base: float = 0.4
    repeat: float = 0.15
    discordance: float = 0.2
    family_share: float = 0.3
    seed_spread: float = 0.02


@dataclass(frozen=True)
class Design:
    """How much is played: tasks by family, rollouts a task, training seeds; `fixed`: families are fixed strata."""

    sizes: tuple[int, ...]
    samples: int = 1
    seeds: int = 1
    fixed: bool = False

    @property
    def num_tasks(self) -> int:
        """All tasks."""
        return sum(self.sizes)

    def num_rollouts(self, arms: int) -> int:
        """All rollouts."""
        return self.num_tasks * self.samples * self.seeds * arms


@dataclass(frozen=True)
class Latent:
    """The probit model of a world: correlation of two rollouts of one task, and of the arms' difficulties."""

    same_task: float
    between_arms: float


def both_pass(one: float, other: float, correlation: float) -> float:
    """The chance that two outcomes with these rates are passes when their latent variables correlate."""
    from scipy.stats import multivariate_normal, norm

    if correlation >= 1 - 1e-9:
        return min(one, other)
    covariance = [[1.0, correlation], [correlation, 1.0]]
    return float(multivariate_normal.cdf([norm.ppf(one), norm.ppf(other)], cov=covariance))


def correlation_of(one: float, other: float, both: float) -> float:
    """The latent correlation, 0..1, under which `both` is the chance of two passes; the nearest where none is."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if both_pass(one, other, middle) < both else (low, middle)
    return high


def latent(world: World, gain: float) -> Latent:
    """The latent model; `UsageError` where the rates contradict each other."""
    reached = world.base + gain
    if not (0 < world.base < 1 and 0 < reached < 1):
        raise UsageError(
            f"A gain of {gain:g} at a pass rate of {world.base:g} leads to {reached:g}, and rates lie between 0 and 1. "
            "Plan with another planning.gain or planning.base."
        )
    chance = world.base + reached - 2 * world.base * reached
    if not (world.repeat > 0 and abs(gain) <= world.discordance <= chance + 1e-9):
        raise UsageError(
            f"Rollouts of the two arms cannot differ in {world.discordance:g} of the tasks: at pass rates of "
            f"{world.base:g} and {reached:g} it is at least {abs(gain):g} and, by chance alone, at most {chance:.3g}. "
            "Plan with another planning.discordance."
        )
    same = correlation_of(world.base, world.base, world.base - world.repeat / 2)
    across = correlation_of(world.base, reached, (world.base + reached - world.discordance) / 2)
    return Latent(same, min(across / max(same, 1e-9), 1.0))


def draw(
    world: World, design: Design, gain: float, num: int, random: np.random.Generator, strata: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """[X, S, T] outcomes of treatment and baseline, means over samples.

    Fixed families are the same in all experiments: their difficulties come from the seed `strata`.
    """
    from scipy.stats import norm

    model, share = latent(world, gain), world.family_share
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    num_worlds, num_families = 1 if design.fixed else num, len(design.sizes)
    of_families = np.random.default_rng(strata) if design.fixed else random
    family_2XF = of_families.normal(size=(2, num_worlds, num_families))
    own_2XT = random.normal(size=(2, num, len(family_T)))
    z_2XT = np.sqrt(share) * family_2XF[:, :, family_T] + np.sqrt(1 - share) * own_2XT
    r = model.between_arms
    difficulty_XT = (z_2XT[0], r * z_2XT[0] + np.sqrt(1 - r**2) * z_2XT[1])
    rates_XS = np.full((2, num, design.seeds), world.base)
    rates_XS[1] = np.clip(world.base + gain + world.seed_spread * random.normal(size=rates_XS[1].shape), 1e-4, 1 - 1e-4)
    arms = []
    for rate_XS, z_XT in zip(rates_XS, difficulty_XT, strict=True):
        latent_XST = norm.ppf(rate_XS)[:, :, None] + np.sqrt(model.same_task) * z_XT[:, None, :]
        p_XST = norm.cdf(latent_XST / np.sqrt(max(1 - model.same_task, 1e-9)))
        arms.append(random.binomial(design.samples, p_XST) / design.samples)
    return arms[1], arms[0]


@dataclass(frozen=True)
class Outlook:
    """What a design would find: the probability of each verdict, and the variance of its estimate by where it is from.

    unit_variance: that of families or tasks. seed_variance: that of the mean over seeds, as the rule would estimate it,
    the noise of single seeds included; 0 below three seeds.
    """

    chances: dict[str, float]
    unit_variance: float
    seed_variance: float


def outlook(
    world: World, design: Design, gain: float, num: int = 400, seed: int = 0, num_flips: int = NUM_FLIPS
) -> Outlook:
    """Simulate a design at a true gain `num` times, by the rule that decides, without lost rollouts and subsets."""
    random = np.random.default_rng(seed)
    num_units = design.num_tasks if design.fixed else len(design.sizes)
    unit_T = np.arange(num_units) if design.fixed else np.repeat(np.arange(num_units), design.sizes)
    signs_RU = draw_signs(num_units, random, num_flips)
    counts = dict.fromkeys((VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED), 0)
    means, errors = [], []
    step = max(1, min(num, BATCH_CELLS // (design.num_tasks * design.seeds)))
    for start in range(0, num, step):
        one = pair(*draw(world, design, gain, min(step, num - start), random), unit_T)
        moved_X, short_X = rejects(one, 0.0, signs_RU), rejects(one, MIN_GAIN, signs_RU) & (one.mean_X < MIN_GAIN)
        gained_X = moved_X & (one.mean_X > 0)
        invalid_X = ~gained_X & (moved_X | short_X)
        counts[VALIDATED if design.seeds >= MIN_SEEDS else PARTIAL] += int(gained_X.sum())
        counts[INVALIDATED] += int(invalid_X.sum())
        counts[UNDERPOWERED] += int((~gained_X & ~invalid_X).sum())
        means.append(one.mean_X)
        errors.append(np.zeros(1) if one.seed_error_X is None else one.seed_error_X)
    by_seed = float((np.concatenate(errors) ** 2).mean())
    by_unit = max(float(np.concatenate(means).var()) - by_seed, 0.0)
    return Outlook({decision: count / num for decision, count in counts.items()}, by_unit, by_seed)


# ---- pilot
# What a pilot says of the tasks: rates for a plan, each with where it came from.
#
# A pilot is any rollouts of the start model, or an earlier evaluation. What it cannot tell is assumed, and said to be.

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


SEEDS = (3, 4, 5, 6, 8, 10, 15, 20)
SAMPLES = (1, 4)
MOST_TASKS = 200_000
NUM = 400


@dataclass(frozen=True)
class Line:
    """One design and what it would find. `detectable`: about the gain that it finds with the wanted power."""

    name: str
    tasks: int
    families: int
    samples: int
    seeds: int
    rollouts: int
    usd: float | None
    chances: Mapping[str, float]
    false_gain: float | None
    detectable: float


@dataclass(frozen=True)
class Study:
    """All that is printed; `assumed` holds each rate of the world and where it came from."""

    gain: float
    power: float
    assumed: Rates
    lines: tuple[Line, ...]
    add_first: tuple[str, ...]
    enough: Line | None


@dataclass(frozen=True)
class Question:
    """What the planner is asked: the world, the true gain, the wanted power, the arms to play and what they cost."""

    world: World
    gain: float
    power: float
    arms: int
    price: Price

    def line(self, name: str, design: Design, num: int = NUM, null: bool = False) -> Line:
        """Simulate one design; with `null` also how often it finds a gain that is not there."""
        found = outlook(self.world, design, self.gain, num)
        none = outlook(self.world, design, 0.0, num).chances if null else None
        rollouts = design.num_rollouts(self.arms)
        return Line(
            name=name,
            tasks=design.num_tasks,
            families=len(design.sizes),
            samples=design.samples,
            seeds=design.seeds,
            rollouts=rollouts,
            usd=None if self.price.usd is None else self.price.usd * rollouts,
            chances=found.chances,
            false_gain=none[VALIDATED] + none[PARTIAL] if none else None,
            detectable=self.detectable(found, design.seeds),
        )

    def detectable(self, found: Outlook, seeds: int, times: float = 1.0) -> float:
        """About the gain found with the wanted power by `times` as many tasks; limits of seeds and units in squares."""
        lasting = min(self.world.seed_spread**2 / seeds, found.seed_variance) if seeds >= MIN_SEEDS else 0.0
        by_seed = lasting + (found.seed_variance - lasting) / times
        by_unit = found.unit_variance / times
        of_seeds = quantile(1 - ALPHA / 2, seeds - 1) if seeds >= MIN_SEEDS else 0.0
        limit: float = (of_seeds**2 * by_seed + quantile(1 - ALPHA / 2, 1e6) ** 2 * by_unit) ** 0.5
        return limit + quantile(self.power, 1e6) * float(by_seed + by_unit) ** 0.5


def planner_study(question: Question, design: Design, assumed: Rates) -> Study:
    """Everything about a design: as it is, with enough seeds for a verdict, with more of each, and what is enough."""
    start = replace(design, seeds=max(design.seeds, MIN_SEEDS))
    lines = [question.line("as asked", design, null=True)]
    if start != design:
        lines.append(question.line(f"with {start.seeds} training seeds", start, null=True))
    more = {
        "twice the seeds": replace(start, seeds=2 * start.seeds),
        "twice the tasks, families as they are": replace(start, sizes=tuple(2 * size for size in start.sizes)),
        "twice the samples": replace(start, samples=2 * start.samples),
    }
    if not start.fixed:
        more = {"twice the families": replace(start, sizes=start.sizes * 2), **more}
    doubled = [question.line(name, each) for name, each in more.items()]
    order = tuple(line.name for line in sorted(doubled, key=lambda line: line.detectable))
    enough = cheapest(question, start)
    return Study(question.gain, question.power, assumed, (*lines, *doubled), order, enough)


def cheapest(question: Question, start: Design) -> Line | None:
    """The design of fewest rollouts that reaches the wanted power, simulated; None when none is found.

    Tasks are added in new families, or in the same ones where these are fixed. The size is found from the variances of
    the smallest design and grown until the simulation agrees.
    """
    candidates: list[tuple[int, Design]] = []
    for seeds in SEEDS:
        for samples in SAMPLES:
            small = replace(start, seeds=seeds, samples=samples)
            found = outlook(question.world, small, question.gain, 200)
            for times in _sizes(small):
                if question.detectable(found, seeds, times) <= question.gain:
                    design = grown(small, times)
                    candidates.append((design.num_rollouts(question.arms), design))
                    break
    for _, design in sorted(candidates, key=lambda candidate: candidate[0]):
        for step in range(3):
            line = question.line("enough", grown(design, 1.3**step), num=200)
            if line.chances[VALIDATED] >= question.power:
                return line
    return None


def _sizes(small: Design) -> Sequence[float]:
    sizes = [1.0]
    while sizes[-1] * small.num_tasks < MOST_TASKS:
        sizes.append(sizes[-1] * 1.25)
    return sizes


def grown(design: Design, times: float) -> Design:
    """The same design with so many times as many families, or tasks of each where families are fixed."""
    if design.fixed:
        return replace(design, sizes=tuple(max(1, round(times * size)) for size in design.sizes))
    whole = int(times)
    rest = round((times - whole) * len(design.sizes))
    step = len(design.sizes) / max(rest, 1)
    return replace(design, sizes=design.sizes * whole + tuple(design.sizes[int(i * step)] for i in range(rest)))


def text(found: Study) -> str:
    """The study for a terminal."""
    from tabulate import tabulate

    rates = ", ".join(f"{name} {value:.3g} ({source})" for name, (value, source) in found.assumed.items())
    shown = [*found.lines, *([found.enough] if found.enough else [])]
    head = (
        "design",
        "tasks",
        "fam.",
        "smp.",
        "seeds",
        "rollouts",
        "USD",
        "VALID.",
        "PART.",
        "INVAL.",
        "UNDERP.",
        "from",
    )
    table = tabulate([_cells(line) for line in shown], head, tablefmt="plain", disable_numparse=True)
    null = [line for line in found.lines if line.false_gain is not None]
    said = "; ".join(f"{line.name} {100 * (line.false_gain or 0):.1f} %" for line in null)
    enough = (
        "The last line is the cheapest design found that reaches it."
        if found.enough
        else f"No design of up to {MOST_TASKS:,} tasks and {SEEDS[-1]} training seeds reaches it."
    )
    return "\n".join(
        [
            f"A true gain of {100 * found.gain:g} points, {100 * found.power:g} % power wanted. Assumed: {rates}.",
            "",
            table,
            "",
            f"`from`: about the gain, in points, that the design finds with {100 * found.power:g} % power. {enough}",
            f"Found where there is no gain: {said}.",
            f"What to add first: {', then '.join(found.add_first)}.",
            "Rollouts and costs are those of evaluation, all arms; training a seed costs extra.",
        ]
    )


def _cells(line: Line) -> tuple[Any, ...]:
    usd = "-" if line.usd is None else f"{line.usd:,.2f}"
    chances = [f"{100 * line.chances[name]:.0f} %" for name in (VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED)]
    size = (line.tasks, line.families, line.samples, line.seeds, f"{line.rollouts:,}")
    return line.name, *size, usd, *chances, f"{100 * line.detectable:.1f}"
