"""Plan an evaluation before it is paid for (`composer evaluate --plan`): what would it show, and what is enough.

A pilot, settings and assumptions give the rates of a task model (pilot.py, task_model.py); experiments are drawn from
it and decided by the rule of every evaluation (design.py): on a design, on the design with twice as much of one thing,
and on the cheapest design that reaches the wanted power (`study_design`, `cheapest`). `detectable` does the same for
the design of an evaluation that decided nothing. Costs are those of evaluation; training a seed costs extra.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import product
from math import hypot, inf
from statistics import NormalDist
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from composer_stages.evaluation.config import Planning
from composer_stages.evaluation.design import FEWEST_EXPERIMENTS, Design, Outlook, Supply, least_gain, outlook
from composer_stages.evaluation.difference import Verdict
from composer_stages.evaluation.inference import ALPHA, MIN_SEEDS, fewest_units, numbered, student_quantile
from composer_stages.evaluation.outcomes import PairedOutcomes, items_table, without_twins
from composer_stages.evaluation.pilot import bootstrap, complete, fit_models, known_items, measure, unit_of
from composer_stages.evaluation.task_model import (
    GIVEN,
    PILOT,
    UNTRAINED,
    Rates,
    TaskModel,
    chance_of_difference,
    normal_quantile,
    task_model,
)
from composer_stages.layout import plural
from composer_stages.runs.activity import activity
from composer_stages.runs.kinds import Row
from composer_stages.terms import SamplingUnit

POWER = 0.8
NUM_SEARCH = 200
"""Simulated experiments per design in the search for the cheapest one."""
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

LARGEST_RANGE = 0.25
"""Of a chance, the width of its 80 % interval over what a pilot leaves open; beyond it nothing is forecast."""
FEWEST_OUTCOMES = 5
"""Passes and failures of a pilot from which on its pass rate is forecast from."""


class Forecast(StrEnum):
    """Whether a pilot is large enough to forecast, or why not."""

    NO_PILOT = "no pilot"
    FEW_OUTCOMES = "few outcomes"
    ONE_UNIT = "one unit"
    WIDE_RANGE = "wide range"
    GOOD_ENOUGH = "good enough"


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

    @property
    def goal(self) -> Verdict:
        """Return the verdict that a gain leads to."""
        return Verdict.PARTIAL if self.untrained else Verdict.VALIDATED

    @property
    def searched_tasks(self) -> int:
        """Return the most tasks of a design that was searched for."""
        return max(MOST_TASKS, self.lines[0].tasks)

    @property
    def fewest_seeds(self) -> int:
        """Return the fewest training seeds of a design."""
        return min(line.seeds for line in self.lines)

    @property
    def widest_range(self) -> tuple[str, tuple[float, float]] | None:
        """Return the design whose chance of a gain the pilot leaves open most, and its interval; None without any."""
        ranges = {line.name: line.validated_range for line in self.lines if line.validated_range}
        return max(ranges.items(), key=lambda item: item[1][1] - item[1][0], default=None)

    @property
    def forecast(self) -> Forecast:
        """Return whether the pilot is large enough to forecast."""
        fewest = min(self.pilot_passes, self.pilot_items - self.pilot_passes)
        if not self.pilots:
            return Forecast.NO_PILOT
        if self.rates["pass_rate"][1] == PILOT and fewest < FEWEST_OUTCOMES:
            return Forecast.FEW_OUTCOMES
        if self.widest_range is None:
            return Forecast.ONE_UNIT
        low, high = self.widest_range[1]
        return Forecast.GOOD_ENOUGH if high - low <= LARGEST_RANGE else Forecast.WIDE_RANGE


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
            result = enough or outlook(self.model, design, self.gain)
            chance, resampled = result.chances[design.goal], self.resampled if ranged else ()
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
            chances=result.chances,
            simulated=result.num,
            false_gain=none[Verdict.VALIDATED] + none[Verdict.PARTIAL] if none else None,
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
        rates: Rates = {name: (value, PILOT) for name, value in vars(self.model).items()}
        return task_model(complete(rates, gain))

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
    config, planning, noun = planned.config, planned.config.planning, planned.config.sampling().noun
    rows = without_twins(items_table(planned.items)).to_pylist()
    set_rates = {
        name: (getattr(planning, name), GIVEN) for name in vars(TaskModel()) if getattr(planning, name) is not None
    }
    set_rates |= {"seed_sd": (0.0, UNTRAINED)} if planned.design.untrained else {}

    def rates_of(rows: Sequence[Row]) -> Rates:
        return complete({**measure(rows, config.baseline, config.treatment), **set_rates}, planning.gain)

    rates = rates_of(rows)
    costs = [row["cost_usd"] for row in rows if row["cost_usd"] is not None]
    price = (
        planning.usd_per_rollout if planning.usd_per_rollout is not None else sum(costs) / len(costs) if costs else None
    )
    resampled, units = fit_models(bootstrap(rows, NUM_PILOTS), rates_of, planning.gain), len(set(map(unit_of, rows)))
    question = PlanQuestion(task_model(rates), planning.gain, planning.power, planned.rollouts, price, resampled, units)
    ready = partial(tell, "designs")
    study = study_design(question, planned.design, planned.supply, rates, ready, noun)
    _, of_one = known_items(rows, config.baseline)
    passes = sum(row["passed"] for row in of_one)
    return replace(study, pilot_passes=passes, pilot_items=len(of_one))


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
    designs = {"as asked": design}
    if start != design:
        designs[f"with {start.seeds} training seeds"] = start
    more = {
        "twice the tasks": replace(start, sizes=supply.sizes(2 * start.num_tasks)),
        "twice the seeds": replace(start, seeds=2 * start.seeds),
        "twice the samples": replace(start, samples=2 * start.samples),
    }
    if more["twice the tasks"].num_tasks < 2 * start.num_tasks:  # the environment has no more
        del more["twice the tasks"]
    if start.untrained:
        del more["twice the seeds"]
    lines, total = list[DesignLine](), len(designs) + len(more) + 1
    for name, each in (designs | more).items():
        lines.append(question.line(name, each, null=name in designs))
        ready(len(lines), total)
    order, fewest = ranked(lines[len(designs) :]), fewest_units()
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
        result = reached(design)
        chance = result.chances[start.goal]
        if chance >= power:
            return question.line(name, design, ranged=False, enough=result)
        missing = (z + normal_quantile(power)) / (z + normal_quantile(max(chance, 0.05)))
        larger = of(design.num_tasks * min(max(missing**2, 1.15), 4), design.seeds, design.samples)
        if larger.num_tasks > design.num_tasks:
            heapreplace(queue, (question.rollouts(larger), number, larger))
        elif heappop(queue) and not queue:
            break
    return None


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
    middle, *each = (normal_quantile(least + (1 - 2 * least) * share) for share in (chance, *chances))
    half = float(student_quantile(units - 1, 0.9)) * float(np.std(each, ddof=1)) * (units / (units - 1)) ** 0.5
    low, high = (
        float(np.clip((NormalDist().cdf(end) - least) / (1 - 2 * least), 0, 1))
        for end in (middle - half, middle + half)
    )
    return low, high


def detectable(
    items: pa.Table, treatment: str, baseline: str, outcomes: PairedOutcomes, *, fixed: bool, alpha: float = ALPHA
) -> float | None:
    """Return the gain that 80 % of experiments like a finished one would find; None where they find none so often.

    The finished one is the pilot: its rates, its units, samples and seeds; what it leaves open is assumed.
    """
    arms = items.filter(pc.is_in(items["arm"], pa.array([treatment, baseline])))
    rates = measure(arms.to_pylist(), baseline, treatment)
    per_task = arms.group_by(["arm", "train_seed", "task_id"]).aggregate([([], "count_all")])
    samples = pc.max(per_task["count_all"]).as_py()
    collections = numbered(outcomes.collections).tolist()
    shared = tuple(collections) if MIN_SEEDS <= len(set(collections)) < len(outcomes.seeds) else ()
    sizes = tuple(Counter(outcomes.units).values())
    design = Design(sizes, samples, len(outcomes.seeds), fixed, shared, outcomes.one_model)
    least = least_gain(lambda gain: task_model(complete(rates, gain)), design, POWER, alpha)
    return least and least[0]
