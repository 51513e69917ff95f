"""Experiments that have not been run: outcomes of two arms drawn from a model of tasks, and what would be decided.

A rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit model), so that four
measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on one task differ, how
often rollouts of the two arms differ, and how much of difficulty is shared within a family. The gain of a training is
normal about the true one.

Axis names as in `paired`: X experiments, S training seeds, T tasks, F families, U units.
"""

from dataclasses import dataclass

import numpy as np

from stages.errors import UsageError
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import MIN_SEEDS, pair, rejects
from stages.evaluation.verdict import INVALIDATED, PARTIAL, UNDERPOWERED, VALIDATED
from stages.evaluation.wording import MIN_GAIN

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
