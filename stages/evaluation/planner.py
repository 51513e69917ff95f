"""What an experiment would show, before it is paid for: `composer evaluate --plan`.

The rule that decides is simulated on a design, on that design with twice as much of one thing, and on the cheapest
design that reaches the wanted power. Costs are those of evaluation; what training a seed costs comes on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.evaluation.paired import MIN_SEEDS
from stages.evaluation.pilot import Price, Rates
from stages.evaluation.simulation import Design, Outlook, World, outlook
from stages.evaluation.stats import ALPHA, quantile
from stages.evaluation.verdict import INVALIDATED, PARTIAL, UNDERPOWERED, VALIDATED

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


def study(question: Question, design: Design, assumed: Rates) -> Study:
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
