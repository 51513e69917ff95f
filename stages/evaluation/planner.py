"""Plan an evaluation before it is paid for (`composer evaluate --plan`): what would it show, and what is enough.

A pilot, settings and assumptions give the rates of a task model (`measure`, `complete`); experiments are drawn from it
(`draw`) and decided by the rule of every evaluation (`outlook`): on a design, on the design with twice as much of one
thing, and on the cheapest design that reaches the wanted power (`study_design`, `cheapest`). Designs are made of the
tasks that the environment gives (`Supply`). The gain that a design finds is searched for in the same way
(`least_gain`), also for the design of an evaluation that decided nothing. Large designs are simulated less often, and
their numbers have larger errors. Costs are those of evaluation; training a seed costs extra.

In the task model a rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit
model), so that four measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on
one task differ, how often rollouts of the two arms differ, and how much of difficulty is shared within a family. The
gain of a training is normal about the true one.

A sampling unit is what tasks are drawn in, as the environment declares it: `unit` is short for it in this module.
Axis names as in `inference`: X experiments, S training seeds, T tasks, F families, U units.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from math import asin, hypot, inf, pi
from statistics import NormalDist
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.errors import UsageError
from stages.evaluation.config import Planning
from stages.evaluation.inference import (
    ALPHA,
    BETTER,
    INVALIDATED,
    MIN_SEEDS,
    PARTIAL,
    UNDERPOWERED,
    VALIDATED,
    Array,
    PairedTest,
    decision_of,
    fewest_units,
    numbered,
    shows,
    student_quantile,
)
from stages.evaluation.outcomes import START, PairedOutcomes, items_table, paired, without_twins
from stages.layout import plural
from stages.runs.activity import activity
from stages.runs.kinds import Row
from stages.terms import SamplingUnit

NUM_FLIPS = 399
NUM_EXPERIMENTS = 400
"""Simulated experiments per design, and per step in the search for the gain that one finds."""
NUM_SEARCH = 200
"""Simulated experiments per design in the search for the cheapest one."""
MOST_OUTCOMES, FEWEST_EXPERIMENTS = 2_000_000, 100
"""Outcomes of an arm per simulation, beyond which experiments are left out, and how many are never left out."""
POWER = 0.8
GAIN_STEPS = 6
"""Steps of bisection of a detectable gain, to about a point; between the last two the power is nearly linear."""
BATCH_CELLS = 4_000_000
"""Outcomes of an arm in memory at once. Another number draws other experiments, and published gains move a little."""
normal_quantile = NormalDist().inv_cdf
NODES, WEIGHTS = np.polynomial.legendre.leggauss(48)
"""Of the Gauss-Legendre quadrature over the angle of a correlation."""
SEEDS = (3, 4, 5, 6, 8, 10, 15, 20)
SAMPLES = (1, 4)
MOST_TASKS = 10_000
"""Of the cheapest design, where the one that is planned has fewer."""
DRAWN_TASKS = 2_000
"""Of an environment that lists them, or twice those that are planned: they tell which units there are, and the end."""
FIRST_TASKS, MOST_TRIED = 30, 80
"""Tasks of the designs with which that search begins, and designs that it tries."""

NUM_PILOTS, NUM_RESAMPLED = 40, 100
"""Bootstrap samples of a pilot, and simulated experiments for each: 4,000 in all, in seconds."""
BETWEEN = "between"
"""How often rollouts of two tasks of one unit differ: measured, and turned into `family_correlation` by `complete`."""

PILOT, ASSUMED, GIVEN, UNTRAINED = "pilot", "assumed", "given", "untrained"
Rates = dict[str, tuple[float, str]]
"""A rate and its source (`PILOT`, `ASSUMED`, `GIVEN` or `UNTRAINED`), by the name of its field in `TaskModel`."""
VERDICTS = (VALIDATED, PARTIAL, INVALIDATED, UNDERPOWERED)


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
    """What is played: tasks by unit, rollouts per task, training seeds; `fixed`: units are fixed strata.

    `collection_of`: of pairs, for each training seed, numbered from 0; empty where no three are shared by seeds. Gains
    are then taken to differ from collection to collection, and not within one. `one_baseline`: it is one model (the
    start), played once and compared with every seed. `untrained`: so are both arms, and there is one seed.
    """

    sizes: tuple[int, ...]
    samples: int = 1
    seeds: int = 1
    fixed: bool = False
    collection_of: tuple[int, ...] = ()
    one_baseline: bool = False
    untrained: bool = False

    @property
    def goal(self) -> str:
        """Return the decision that a gain leads to: PARTIAL at best where nothing is trained."""
        return PARTIAL if self.untrained else VALIDATED

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return sum(self.sizes)

    @property
    def num_flipped(self) -> int:
        """Return the number of units whose signs the test flips: tasks where units are fixed."""
        return self.num_tasks if self.fixed else len(self.sizes)


@dataclass(frozen=True)
class Supply:
    """The tasks that an environment gives, as far as they were drawn: the unit of each, numbered as they appear.

    complete: the environment has no more tasks. grows: more tasks would be of new units.
    """

    unit_T: tuple[int, ...]
    complete: bool = False
    grows: bool = True

    @classmethod
    def of(cls, units: Sequence[str], *, complete: bool, fixed: bool) -> "Supply":
        """Return the supply of these units, one a task; it grows where new ones appeared in the second half."""
        number = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
        unit_T = tuple(number[unit] for unit in units)
        return cls(unit_T, complete, not (complete or fixed) and 2 * unit_T.index(max(unit_T)) >= len(unit_T))

    def sizes(self, tasks: int) -> tuple[int, ...]:
        """Return how many of the first `tasks` are of each unit, or of all that there are.

        Of more than were drawn: as if those drawn came again, in new units where it grows.
        """
        copies, rest = (1, 0) if self.complete and tasks > len(self.unit_T) else divmod(tasks, len(self.unit_T))
        every, first = Counter(self.unit_T), Counter(self.unit_T[:rest])
        if self.grows:
            return (*copies * tuple(every.values()), *first.values())
        return tuple(size for unit, num in every.items() if (size := copies * num + first[unit]))


@dataclass(frozen=True)
class Outlook:
    """What a design would find: the probability of each verdict, by the number of simulated experiments."""

    num: int
    chances: dict[str, float]


@dataclass(frozen=True)
class DesignLine:
    """One design and what it would find.

    `chances`: of each verdict, from `simulated` experiments. `validated_range`: an 80 % interval of the chance that a
    gain is found (VALIDATED, of models PARTIAL) over what the pilot leaves open, None without a pilot. `detectable`:
    the gain that the design finds with the wanted power, by simulation, with its standard error; None where it finds
    none so often.
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
    detectable_error: float | None = None
    validated_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Study:
    """What a plan of an evaluation found; `rates` holds each rate of the task model and its source.

    `pilots`: the names of the runs that rates come from; of their `pilot_items` rollouts of the baseline `pilot_passes`
    passed. `sampling_unit`: its noun. `add_first`: what to double,
    the most useful first and what the simulation cannot tell apart in one text; or the units where the test needs more
    of them: then `fewest_units` is how many it needs, else None. `most_tasks`, `most_units`: how many the environment
    has, None where no end was seen. `beyond`: the cheapest design with more tasks and units than that, where none of
    the environment's is enough. `untrained`: both arms are models without training seeds.
    """

    gain: float
    power: float
    rates: Rates
    lines: tuple[DesignLine, ...]
    add_first: tuple[str, ...]
    enough: DesignLine | None
    beyond: DesignLine | None = None
    most_tasks: int | None = None
    most_units: int | None = None
    untrained: bool = False
    sampling_unit: str = "family"
    fewest_units: int | None = None
    pilots: tuple[str, ...] = ()
    pilot_passes: int = 0
    pilot_items: int = 0


@dataclass(frozen=True)
class PlanQuestion:
    """What the planner is asked: the task model, the true gain, the wanted power, the rollouts of a design, their cost.

    `usd_per_rollout` is None where it is not known. `resampled`: the task models of the pilot's bootstrap samples, of
    `pilot_units` units each.
    """

    model: TaskModel
    gain: float
    power: float
    rollouts: Callable[[Design], int]
    usd_per_rollout: float | None = None
    resampled: Sequence[TaskModel] = ()
    pilot_units: int = 0

    def line(
        self, name: str, design: Design, *, null: bool = False, ranged: bool = True, enough: Outlook | None = None
    ) -> DesignLine:
        """Simulate one design.

        null: also how often it finds a gain that is not there. ranged: also under what the pilot leaves open. enough:
        the outlook of a design that was found to reach the wanted power, which is not simulated again.
        """
        with activity(f"simulating the design '{name}'"):
            found = enough or outlook(self.model, design, self.gain)
            chance, resampled = found.chances[design.goal], self.resampled if ranged else ()
            validated = validated_range(chance, resampled, self.pilot_units, design, self.gain)
            none = outlook(self.without_gain, design, 0.0).chances if null else None
            detectable = (self.gain, None) if enough else self.detectable(design) or (None, None)
        rollouts = self.rollouts(design)
        return DesignLine(
            name=name,
            tasks=design.num_tasks,
            sampling_units=len(design.sizes),
            samples=design.samples,
            seeds=design.seeds,
            rollouts=rollouts,
            usd=None if self.usd_per_rollout is None else self.usd_per_rollout * rollouts,
            chances=found.chances,
            simulated=found.num,
            false_gain=none[VALIDATED] + none[PARTIAL] if none else None,
            detectable=detectable[0],
            detectable_error=detectable[1],
            validated_range=validated,
        )

    @property
    def without_gain(self) -> TaskModel:
        """Return the task model where the arms have one pass rate, at which they differ by chance less often."""
        most = chance_of_difference(self.model.pass_rate, self.model.pass_rate)
        return replace(self.model, arms_differ=min(self.model.arms_differ, most))

    def model_at(self, gain: float) -> TaskModel:
        """Return the task model at another gain: arms that differ more have outcomes that differ more often."""
        given: Rates = {name: (value, PILOT) for name, value in vars(self.model).items()}
        return task_model(complete(given, gain))

    def detectable(self, design: Design) -> tuple[float, float] | None:
        """Return the gain that a design finds with the wanted power and its error, as `least_gain` does."""
        return least_gain(self.model_at, design, self.power)


class PlanSettings(Protocol):
    """The settings of `evaluate` that a plan reads."""

    planning: Planning
    baseline: str
    treatment: str

    def sampling(self) -> SamplingUnit:
        """Return the sampling unit of the tasks."""
        ...


@dataclass(frozen=True)
class PlannedEvaluation:
    """An evaluation that was not played: its settings, the pilots' items, the tasks that there are, and its design.

    rollouts: how many are played on a design.
    """

    config: PlanSettings
    items: Sequence[Row]
    supply: Supply
    design: Design
    rollouts: Callable[[Design], int]


def study(planned: PlannedEvaluation, tell: Callable[[str, int, int], None]) -> Study:
    """Return what an evaluation would find and cost.

    `tell` is called with what is counted, how many designs are simulated, and how many there are.
    """
    config, asked, noun = planned.config, planned.config.planning, planned.config.sampling().noun
    rows = without_twins(items_table(planned.items)).to_pylist()
    given = {name: (getattr(asked, name), GIVEN) for name in vars(TaskModel()) if getattr(asked, name) is not None}
    given |= {"seed_sd": (0.0, UNTRAINED)} if planned.design.untrained else {}

    def rates_of(rows: Sequence[Row]) -> Rates:
        return complete({**measure(rows, config.baseline, config.treatment), **given}, asked.gain)

    rates = rates_of(rows)
    costs = [row["cost_usd"] for row in rows if row["cost_usd"] is not None]
    price = asked.usd_per_rollout if asked.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    resampled, units = models_of(bootstrap(rows, NUM_PILOTS), rates_of, asked.gain), len(set(map(unit_of, rows)))
    question = PlanQuestion(task_model(rates), asked.gain, asked.power, planned.rollouts, price, resampled, units)
    ready = partial(tell, "designs")
    found = study_design(question, planned.design, planned.supply, rates, ready, noun)
    _, of_one = known_items(rows, config.baseline)
    passes = sum(row["passed"] for row in of_one)
    return replace(found, pilot_passes=passes, pilot_items=len(of_one))


def detectable(
    items: pa.Table,
    treatment: str,
    baseline: str,
    found: PairedOutcomes,
    *,
    fixed: bool,
    alpha: float = ALPHA,
) -> float | None:
    """Return the gain that 80 % of experiments like a finished one would find; None where they find none so often.

    The finished one is the pilot: its rates, its units, samples and seeds; what it leaves open is assumed.
    """
    arms = items.filter(pc.is_in(items["arm"], pa.array([treatment, baseline])))
    rates = measure(arms.to_pylist(), baseline, treatment)
    per_task = arms.group_by(["arm", "train_seed", "task_id"]).aggregate([([], "count_all")])
    samples = pc.max(per_task["count_all"]).as_py()
    collections = numbered(found.collections).tolist()
    shared = tuple(collections) if MIN_SEEDS <= len(set(collections)) < len(found.seeds) else ()
    sizes = tuple(Counter(found.units).values())
    design = Design(sizes, samples, len(found.seeds), fixed, shared, found.one_model)
    least = least_gain(lambda gain: task_model(complete(rates, gain)), design, POWER, alpha)
    return least and least[0]


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


def models_of(
    pilots: Iterable[Sequence[Row]], rates_of: Callable[[Sequence[Row]], Rates], gain: float
) -> list[TaskModel]:
    """Return the task models of pilots; those whose rates contradict the gain (a pass rate near 1) are no model."""
    found = []
    for rows in pilots:
        with suppress(UsageError):
            model = task_model(rates_of(rows))
            latent_correlations(model, gain)
            found.append(model)
    return found


def validated_range(
    chance: float, models: Sequence[TaskModel], units: int, design: Design, gain: float
) -> tuple[float, float] | None:
    """Return the 80 % interval of the chance that a gain is found over what a pilot leaves open; None without a pilot.

    chance: by the pilot itself. models: of its bootstrap samples, of `units` units each. Student's t about the normal
    quantile of the chance: percentiles of the samples are too narrow and too hopeful for a few units, as samples of few
    units vary less than their populations.
    """
    if len(models) < 2:
        return None
    drawn = enumerate(models)
    chances = [outlook(model, design, gain, NUM_RESAMPLED, seed).chances[design.goal] for seed, model in drawn]
    least = 0.5 / NUM_RESAMPLED  # none in so many experiments is no chance of 0, which has no quantile
    middle, *each = (normal_quantile(least + (1 - 2 * least) * one) for one in (chance, *chances))
    half = float(student_quantile(units - 1, 0.9)) * float(np.std(each, ddof=1)) * (units / (units - 1)) ** 0.5
    low, high = (
        float(np.clip((NormalDist().cdf(end) - least) / (1 - 2 * least), 0, 1))
        for end in (middle - half, middle + half)
    )
    return low, high


def unit_of(item: Row) -> str:
    """Return the unit that an item's task is one of; its family, or the task itself, where no unit is recorded."""
    return str(item.get("unit") or item["family"] or item["task_id"])


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
    if found := paired(items_table(rows), treatment, baseline):
        a, b = found.treatment_ST, found.baseline_ST
        rates["arms_differ"] = (float(np.nanmean(a * (1 - b) + b * (1 - a))), PILOT)
        gains = list(found.gain_by_seed.values())
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
    items: Iterable[Row], key: Callable[[Row], Hashable], other: Callable[[Row], Hashable] | None = None
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


def task_model(rates: Rates) -> TaskModel:
    """Return the task model of complete rates."""
    return TaskModel(**{name: value for name, (value, _) in rates.items()})


def chance_of_difference(one: float, other: float) -> float:
    """Return how often one of two independent outcomes with these rates passes and the other fails."""
    return one + other - 2 * one * other


def correlation_of(one: float, other: float, both: float) -> float:
    """Return the latent correlation, 0..1, under which two outcomes with rates `one` and `other` pass both so often.

    The nearest correlation where none gives `both`.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_of_both(one, other, middle) < both else (low, middle)
    return high


def chance_of_both(one: float, other: float, correlation: float) -> float:
    """Return how often two outcomes with these rates both pass, where their latent variables are so correlated.

    The bivariate normal distribution as an integral over the angle of the correlation (Plackett, Biometrika 1954).
    """
    if correlation >= 1 - 1e-9:
        return min(one, other)
    h, k = normal_quantile(one), normal_quantile(other)
    half = asin(correlation) / 2
    sine = np.sin(half * (1 + NODES))
    density = np.exp(-(h**2 + k**2 - 2 * h * k * sine) / (2 * (1 - sine**2)))
    return one * other + half * float(WEIGHTS @ density) / (2 * pi)


@cache
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
) -> tuple[Array, Array]:
    """Return simulated [X, S, T] outcomes of treatment and baseline, means over samples.

    Fixed units are the same in all experiments: their difficulties come from the seed `strata`.
    """
    (same_task, r), share = latent_correlations(model, gain), model.family_correlation
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    num_models, num_families = 1 if design.fixed else num, len(design.sizes)
    of_families = np.random.default_rng(strata) if design.fixed else random
    family_2XF = of_families.normal(size=(2, num_models, num_families))
    own_2XT = random.normal(size=(2, num, len(family_T)))
    z_2XT = np.sqrt(share) * family_2XF[:, :, family_T] + np.sqrt(1 - share) * own_2XT
    difficulty_XT = (z_2XT[0], r * z_2XT[0] + np.sqrt(1 - r**2) * z_2XT[1])
    num_top = max(design.collection_of, default=design.seeds - 1) + 1
    of_top_XC = model.seed_sd * random.normal(size=(num, num_top))
    gain_XS = gain + of_top_XC[:, list(design.collection_of or range(design.seeds))]
    rates_XS = np.clip(model.pass_rate + gain_XS, 1e-4, 1 - 1e-4)
    threshold_XS = np.fromiter(map(normal_quantile, rates_XS.flat), float).reshape(rates_XS.shape)
    arms = []
    for threshold, z_XT in ((normal_quantile(model.pass_rate), difficulty_XT[0]), (threshold_XS, difficulty_XT[1])):
        scale = np.sqrt(max(1 - same_task, 1e-9))
        own_XT, of_seed_XS = np.sqrt(same_task) / scale * z_XT, np.broadcast_to(threshold / scale, rates_XS.shape)
        level_XST = own_XT.astype(np.float32)[:, None] + of_seed_XS.astype(np.float32)[:, :, None]
        passed_XST = np.zeros(level_XST.shape)
        for _ in range(design.samples):
            passed_XST += random.standard_normal(level_XST.shape, np.float32) < level_XST
        arms.append(passed_XST / design.samples)
    if design.one_baseline:
        arms[0] = np.broadcast_to(arms[0][:, :1], arms[0].shape)
    return arms[1], arms[0]


def outlook(model: TaskModel, design: Design, gain: float, num: int = NUM_EXPERIMENTS, seed: int = 0) -> Outlook:
    """Simulate a design at a true gain, by the rule that decides, without lost rollouts and subsets.

    num: experiments, of which those are left out that a large design has no time for.
    """
    tests = simulated(model, design, gain, in_time(design, num), seed)
    found = [decision_of(shown, design.seeds) for test in tests for shown in shows([test]).tolist()]
    return Outlook(len(found), {decision: found.count(decision) / len(found) for decision in VERDICTS})


def in_time(design: Design, num: int) -> int:
    """Return how many of `num` experiments are simulated: of large designs fewer."""
    return min(num, max(MOST_OUTCOMES // (design.num_tasks * design.seeds * design.samples), FEWEST_EXPERIMENTS))


def simulated(model: TaskModel, design: Design, gain: float, num: int, seed: int = 0) -> Iterator[PairedTest]:
    """Yield the tests of `num` experiments of a design, several at once."""
    random = np.random.default_rng(seed)
    unit_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    collection_S = np.array(design.collection_of) if design.collection_of else None
    step = max(1, min(num, BATCH_CELLS // (design.num_tasks * design.seeds)))
    for start in range(0, num, step):
        arms = draw(model, design, gain, min(step, num - start), random)
        yield PairedTest(*arms, unit_T, fixed=design.fixed, collection_S=collection_S, num_flips=NUM_FLIPS, seed=seed)


def least_gain(
    model_at: Callable[[float], TaskModel], design: Design, power: float, alpha: float = ALPHA
) -> tuple[float, float] | None:
    """Return the gain that a design finds with this power, by bisection, simulated anew at every gain, and its error.

    None where not even the largest one that the pass rate leaves room for is found so often. The same random numbers
    are drawn at every gain, so that the power is nearly a monotone function of it; that of 400 experiments is known to
    2 points. The standard error is that of the power, in gains: by the powers that were found on the way.
    """
    power_at, num = dict[float, float](), in_time(design, NUM_EXPERIMENTS)

    def found(gain: float) -> float:
        tests = simulated(model_at(gain), design, gain, num)
        power_at[gain] = float(np.concatenate([shows([test], alpha=alpha) == BETTER for test in tests]).mean())
        return power_at[gain]

    low, high, at_low = 0.0, 0.99 - model_at(0.0).pass_rate, 0.0
    if design.num_flipped < fewest_units(alpha) or high <= 0 or (at_high := found(high)) < power:
        return None
    for _ in range(GAIN_STEPS):
        middle = (low + high) / 2
        at_middle = found(middle)
        if at_middle < power:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    gains, error = sorted(power_at), (power * (1 - power) / num) ** 0.5
    rising = np.maximum.accumulate([power_at[gain] for gain in gains])
    below, above = np.interp([power - error, power + error], rising, gains)
    # A step of bisection moves the power of a large experiment by many points.
    return low + (high - low) * (power - at_low) / (at_high - at_low), float(above - below) / 2


def study_design(
    question: PlanQuestion,
    design: Design,
    supply: Supply,
    rates: Rates,
    ready: Callable[[int, int], None] = lambda done, total: None,
    unit: str = "family",
) -> Study:
    """Study a design: as it is, with enough seeds for a verdict, with twice of each, and what is enough.

    `unit` is the noun of a sampling unit. `ready` is called with the number of designs that are simulated, and that of
    all.
    """
    start = design if design.untrained else replace(design, seeds=max(design.seeds, MIN_SEEDS))
    asked = {"as asked": design}
    if start != design:
        asked[f"with {start.seeds} training seeds"] = start
    more = {
        "twice the tasks": replace(start, sizes=supply.sizes(2 * start.num_tasks)),
        "twice the seeds": replace(start, seeds=2 * start.seeds),
        "twice the samples": replace(start, samples=2 * start.samples),
    }
    if more["twice the tasks"].num_tasks < 2 * start.num_tasks:  # the environment has no more
        del more["twice the tasks"]
    if start.untrained:
        del more["twice the seeds"]
    lines, total = list[DesignLine](), len(asked) + len(more) + 1
    for name, each in (asked | more).items():
        lines.append(question.line(name, each, null=name in asked))
        ready(len(lines), total)
    order, fewest = ranked(lines[len(asked) :]), fewest_units()
    if too_few := start.num_flipped < fewest:  # nothing else helps a design that cannot reject
        reachable = replace(start, sizes=supply.sizes(MOST_TASKS)).num_flipped >= fewest
        order = ("tasks" if start.fixed else plural(unit),) if reachable else ()
    enough, beyond = cheapest("enough", question, start, supply), None
    if enough is None and not supply.grows:
        endless = Supply(supply.unit_T[: start.num_tasks], grows=not start.fixed)
        beyond = cheapest(f"with more {'tasks' if start.fixed else plural(unit)}", question, start, endless)
    ready(total, total)
    return Study(
        question.gain,
        question.power,
        rates,
        tuple(lines),
        order,
        enough,
        beyond,
        most_tasks=len(supply.unit_T) if supply.complete else None,
        most_units=None if supply.grows else len(set(supply.unit_T)),
        untrained=start.untrained,
        sampling_unit=unit,
        fewest_units=fewest if too_few else None,
    )


def ranked(lines: Iterable[DesignLine]) -> tuple[str, ...]:
    """Return designs by the gain that they find, the smallest first; one text for those that are not told apart.

    A gain is larger than the first one of a text where it is so by two standard errors of their difference.
    """
    groups = list[list[DesignLine]]()
    for line in sorted(lines, key=lambda line: line.detectable or inf):
        (gain, error), first = (line.detectable or inf, line.detectable_error or 0.0), groups[-1][0] if groups else line
        least = (first.detectable or inf) + 2 * hypot(error, first.detectable_error or 0.0)
        if groups and gain <= least:
            groups[-1].append(line)
        else:
            groups.append([line])
    return tuple(" or ".join(line.name for line in group) for group in groups)


def cheapest(name: str, question: PlanQuestion, start: Design, supply: Supply) -> DesignLine | None:
    """Return the design of fewest rollouts that reaches the wanted power, simulated; None when none is found.

    Of all designs the one of fewest rollouts is simulated, and gets more tasks where its power is too low, until one
    reaches it.
    """
    most, power, z = max(MOST_TASKS, start.num_tasks), question.power, normal_quantile(1 - ALPHA / 2)

    def of(tasks: float, seeds: int, samples: int) -> Design:
        return replace(start, sizes=supply.sizes(min(round(tasks), most)), seeds=seeds, samples=samples)

    def reached(design: Design, num: int = NUM_SEARCH) -> Outlook:
        with activity(f"searching for the cheapest design: {design.num_tasks:,} tasks, {design.seeds} seeds"):
            return outlook(question.model, design, question.gain, num)

    def seeds_suffice(seeds: int) -> bool:
        """Return whether the spread of the seeds' gains alone leaves the wanted power."""
        error = question.model.seed_sd / seeds**0.5
        return error * (float(student_quantile(seeds - 1, 1 - ALPHA / 2)) + normal_quantile(power)) <= question.gain

    all_seeds = (1,) if start.untrained else [seeds for seeds in SEEDS if seeds_suffice(seeds)]
    if not all_seeds:
        return None
    # Of thousands of tasks one sample is as good as several.
    largest = reached(of(most, all_seeds[-1], SAMPLES[-1 if supply.complete else 0]), FEWEST_EXPERIMENTS // 2)
    if largest.chances[start.goal] + 2 * (power * (1 - power) / largest.num) ** 0.5 < power:
        return None
    smallest = [of(FIRST_TASKS, seeds, samples) for seeds, samples in product(all_seeds, SAMPLES)]
    queue = [(question.rollouts(design), number, design) for number, design in enumerate(smallest)]
    heapify(queue)
    for number in range(len(queue), MOST_TRIED):
        _, _, design = queue[0]
        found = reached(design)
        chance = found.chances[start.goal]
        if chance >= power:
            return question.line(name, design, ranged=False, enough=found)
        missing = (z + normal_quantile(power)) / (z + normal_quantile(max(chance, 0.05)))
        larger = of(design.num_tasks * min(max(missing**2, 1.15), 4), design.seeds, design.samples)
        if larger.num_tasks > design.num_tasks:
            heapreplace(queue, (question.rollouts(larger), number, larger))
        elif heappop(queue) and not queue:
            break
    return None
