"""Designs of an evaluation, and what they would find: experiments are drawn from the task model, and decided.

A design is what is played: tasks by unit, samples, training seeds. Designs are made of the tasks that the environment
gives (`Supply`). The gain that a design finds is searched for by simulation, too (`least_gain`). Large designs are
simulated less often, and their numbers have larger errors.

A sampling unit is what tasks are drawn in, as the environment declares it: `unit` is short for it in this module.
Axis names as in `inference`: X experiments, S training seeds, T tasks, F families, U units.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from composer_stages.evaluation.difference import GAINS, Verdict
from composer_stages.evaluation.inference import ALPHA, Array, PairedTest, fewest_units, shows, verdict_of
from composer_stages.evaluation.task_model import TaskModel, latent_correlations, normal_quantile

NUM_FLIPS = 399
NUM_EXPERIMENTS = 400
"""Simulated experiments per design, and per step in the search for the gain that one finds."""
MOST_OUTCOMES, FEWEST_EXPERIMENTS = 2_000_000, 100
"""Outcomes of an arm per simulation, beyond which experiments are left out, and how many are never left out."""
GAIN_STEPS = 6
"""Steps of bisection of a detectable gain, to about a point; between the last two the power is nearly linear."""
BATCH_CELLS = 4_000_000
"""Outcomes of an arm in memory at once. Another number draws other experiments, and published gains move a little."""
VERDICTS = (Verdict.VALIDATED, Verdict.PARTIAL, Verdict.INVALIDATED, Verdict.UNDERPOWERED)


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
        return Verdict.PARTIAL if self.untrained else Verdict.VALIDATED

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
        copies, remainder = (1, 0) if self.complete and tasks > len(self.unit_T) else divmod(tasks, len(self.unit_T))
        counts, first = Counter(self.unit_T), Counter(self.unit_T[:remainder])
        if self.grows:
            return (*copies * tuple(counts.values()), *first.values())
        return tuple(size for unit, num in counts.items() if (size := copies * num + first[unit]))


@dataclass(frozen=True)
class Outlook:
    """What a design would find: the probability of each verdict, by the number of simulated experiments."""

    num: int
    chances: dict[str, float]


def outlook(model: TaskModel, design: Design, gain: float, num: int = NUM_EXPERIMENTS, seed: int = 0) -> Outlook:
    """Simulate a design at a true gain, by the rule that decides, without lost rollouts and subsets.

    num: experiments, of which those are left out that a large design has no time for.
    """
    tests = simulated(model, design, gain, in_time(design, num), seed)
    verdicts = [verdict_of(decision, design.seeds) for test in tests for decision in shows([test]).tolist()]
    return Outlook(len(verdicts), {verdict.value: verdicts.count(verdict) / len(verdicts) for verdict in VERDICTS})


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
        power_at[gain] = float(np.concatenate([np.isin(shows([test], alpha=alpha), GAINS) for test in tests]).mean())
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
