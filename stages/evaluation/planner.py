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

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations

import numpy as np
from pydantic import Field

from stages.errors import UsageError
from stages.evaluation.arms import START, Item, failed, rollout_items, without_twins
from stages.evaluation.comparison import gain_by_seed, outcomes
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import MIN_SEEDS, pair, rejects
from stages.evaluation.stats import ALPHA, quantile
from stages.evaluation.verdict import INVALIDATED, MIN_GAIN, PARTIAL, UNDERPOWERED, VALIDATED
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
SEEDS = (3, 4, 5, 6, 8, 10, 15, 20)
SAMPLES = (1, 4)
MOST_TASKS = 200_000

PILOT, ASSUMED, GIVEN = "pilot", "assumed", "given"
Rates = dict[str, tuple[float, str]]
"""A rate and its source (`PILOT`, `ASSUMED` or `GIVEN`), by the name of its field in `TaskModel`."""
HEAD = (
    *("design", "tasks", "fam.", "smp.", "seeds", "rollouts", "USD"),
    *("VALID.", "PART.", "INVAL.", "UNDERP.", "from"),
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
    """The part of a task's difficulty that its family has."""
    seed_spread: float | None = Field(None, ge=0, lt=1)
    """The standard deviation of the gain from training to training."""
    usd_per_rollout: float | None = Field(None, ge=0)


@dataclass(frozen=True)
class TaskModel:
    """Assumptions on tasks and training; rates and differences are fractions of one.

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
    """What is played: tasks by family, rollouts per task, training seeds; `fixed`: families are fixed strata."""

    sizes: tuple[int, ...]
    samples: int = 1
    seeds: int = 1
    fixed: bool = False

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Outlook:
    """What a design would find: the probability of each verdict, and the variance of its estimate by source.

    unit_variance: that of families or tasks. seed_variance: that of the mean over seeds, as the rule would estimate it,
    the noise of single seeds included; 0 below three seeds.
    """

    chances: dict[str, float]
    unit_variance: float
    seed_variance: float


@dataclass(frozen=True)
class DesignLine:
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
    """Everything that is printed; `assumed` holds each rate of the task model and its source."""

    gain: float
    power: float
    assumed: Rates
    lines: tuple[DesignLine, ...]
    add_first: tuple[str, ...]
    enough: DesignLine | None


@dataclass(frozen=True)
class PlanQuestion:
    """What the planner is asked: the task model, the true gain, the wanted power, the arms to play and their cost.

    `usd_per_rollout` is None where it is not known.
    """

    model: TaskModel
    gain: float
    power: float
    arms: int
    usd_per_rollout: float | None = None

    def line(self, name: str, design: Design, num: int = NUM_EXPERIMENTS, null: bool = False) -> DesignLine:
        """Simulate one design; with `null` also how often it finds a gain that is not there."""
        found = outlook(self.model, design, self.gain, num)
        none = outlook(self.model, design, 0.0, num).chances if null else None
        rollouts = design.num_tasks * design.samples * design.seeds * self.arms
        return DesignLine(
            name=name,
            tasks=design.num_tasks,
            families=len(design.sizes),
            samples=design.samples,
            seeds=design.seeds,
            rollouts=rollouts,
            usd=None if self.usd_per_rollout is None else self.usd_per_rollout * rollouts,
            chances=found.chances,
            false_gain=none[VALIDATED] + none[PARTIAL] if none else None,
            detectable=self.detectable(found, design.seeds),
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
    family_sizes: Sequence[int],
    samples: int,
    fixed: bool,
) -> tuple[Row, str]:
    """Return what an evaluation of `num_arms` arms would find and cost, as JSON and as text.

    `family_sizes`: the tasks of each family. `fixed`: families are fixed strata. Raises `BadInput` for a pilot without
    rollouts.
    """
    items: list[Row] = []
    for run in pilots:
        items += run.rows(EVAL_ITEM) if run.holds(EVAL_ITEM) else [item for _, item in rollout_items(run, START)]
    names = TaskModel.__annotations__
    given = {name: (getattr(asked, name), GIVEN) for name in names if getattr(asked, name) is not None}
    rates = complete({**measure(items, baseline, treatment), **given}, asked.gain)
    model = TaskModel(**{name: value for name, (value, _) in rates.items()})
    design = Design(tuple(family_sizes), samples, asked.seeds, fixed)
    costs = [item["cost_usd"] for item in items if item["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    found = study_design(PlanQuestion(model, asked.gain, asked.power, num_arms, price), design, rates)
    return asdict(found), study_text(found)


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
        repeat = float(np.clip(differing, 0.01, 2 * base * (1 - base)))
        rates["repeat"] = (repeat, PILOT)
        between = share_differing(
            of_one, lambda item: (item["train_seed"], item["family"]), lambda item: item["task_id"]
        )
        if between is not None:
            same_task = correlation_of(base, base, base - repeat / 2)
            same_family = correlation_of(base, base, base - between / 2)
            rates["family_share"] = (float(np.clip(same_family / max(same_task, 1e-6), 0, 1)), PILOT)
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
    return {
        "base": base,
        "repeat": repeat,
        "discordance": (discordance, known[1]),
        "family_share": rates.get("family_share", (default.family_share, ASSUMED)),
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

    Fixed families are the same in all experiments: their difficulties come from the seed `strata`.
    """
    from scipy.stats import norm

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
    for rate_XS, z_XT in zip(rates_XS, difficulty_XT, strict=True):
        latent_XST = norm.ppf(rate_XS)[:, :, None] + np.sqrt(same_task) * z_XT[:, None, :]
        p_XST = norm.cdf(latent_XST / np.sqrt(max(1 - same_task, 1e-9)))
        arms.append(random.binomial(design.samples, p_XST) / design.samples)
    return arms[1], arms[0]


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
    num_units = design.num_tasks if design.fixed else len(design.sizes)
    unit_T = np.arange(num_units) if design.fixed else np.repeat(np.arange(num_units), design.sizes)
    signs_RU = draw_signs(num_units, random, num_flips)
    counts = dict.fromkeys((VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED), 0)
    means, errors = [], []
    step = max(1, min(num, BATCH_CELLS // (design.num_tasks * design.seeds)))
    for start in range(0, num, step):
        one = pair(*draw(model, design, gain, min(step, num - start), random), unit_T)
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


def study_design(question: PlanQuestion, design: Design, assumed: Rates) -> Study:
    """Study a design: as it is, with enough seeds for a verdict, with twice of each, and what is enough."""
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


def cheapest(question: PlanQuestion, start: Design) -> DesignLine | None:
    """Return the design of fewest rollouts that reaches the wanted power, simulated; None when none is found.

    Tasks are added in new families, or in the same ones where these are fixed. The size is found from the variances of
    the smallest design and grown until the simulation agrees.
    """
    candidates: list[tuple[int, Design]] = []
    for seeds in SEEDS:
        for samples in SAMPLES:
            small = replace(start, seeds=seeds, samples=samples)
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
    """Return the design with `times` as many families, or tasks of each family where families are fixed."""
    if design.fixed:
        return replace(design, sizes=tuple(max(1, round(times * size)) for size in design.sizes))
    whole = int(times)
    rest = round((times - whole) * len(design.sizes))
    step = len(design.sizes) / max(rest, 1)
    return replace(design, sizes=design.sizes * whole + tuple(design.sizes[int(i * step)] for i in range(rest)))


def study_text(found: Study) -> str:
    """Return the study for a terminal."""
    from tabulate import tabulate

    cells = []
    for line in (*found.lines, *([found.enough] if found.enough else [])):
        usd = "-" if line.usd is None else f"{line.usd:,.2f}"
        chances = [f"{100 * line.chances[name]:.0f} %" for name in (VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED)]
        size = (line.tasks, line.families, line.samples, line.seeds, f"{line.rollouts:,}")
        cells.append((line.name, *size, usd, *chances, f"{100 * line.detectable:.1f}"))
    rates = ", ".join(f"{name} {value:.3g} ({source})" for name, (value, source) in found.assumed.items())
    null = [line for line in found.lines if line.false_gain is not None]
    false_gains = "; ".join(f"{line.name} {100 * (line.false_gain or 0):.1f} %" for line in null)
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
            f"`from`: about the gain, in points, that the design finds with {100 * found.power:g} % power. {enough}",
            f"Found where there is no gain: {false_gains}.",
            f"What to add first: {', then '.join(found.add_first)}.",
            "Rollouts and costs are those of evaluation, all arms; training a seed costs extra.",
        ]
    )
