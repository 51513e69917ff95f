"""Power of a paired experiment, before it is run: what n tasks can see, and how many tasks an effect needs.

The test planned for is the exact McNemar test on one outcome a task; families, samples and seeds enter as a design
effect that divides the number of tasks. Rates and effects are fractions of one, not points.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np

from stages.errors import UsageError
from stages.evaluation.stats import ALPHA, POWER


@dataclass(frozen=True)
class Power:
    """What an experiment of `num_tasks` paired tasks can see; `mde` is None where no effect reaches 80 % power."""

    num_tasks: int
    effect: float
    discordance: float
    design_effect: float
    power: float
    mde: float | None
    needed_tasks: int


def power(num_tasks: int, p_a: float, discordance: float, effect: float = 0.02, design_effect: float = 1.0) -> Power:
    """Power of the exact McNemar test, the effect it finds with 80 % power, and the tasks that `effect` needs for that.

    `p_a` is the baseline's pass rate, `discordance` the share of tasks whose outcome differs between the arms (taken as
    `effect` where it is smaller), and `design_effect` the factor by which the variance differs from that of independent
    tasks with one sample each (see `kish_design_effect`).
    """
    if num_tasks < 1 or not 0 <= p_a < 1 or not 0 < discordance <= 1 or design_effect <= 0:
        given = f"{num_tasks} tasks, pass rate {p_a}, discordance {discordance}, design effect {design_effect}"
        raise UsageError(f"Cannot plan with {given}: rates lie in 0..1, and there must be a task and a discordance.")
    largest = largest_effect(p_a, discordance)
    if not 0 < effect <= largest or (discordance - effect) / 2 > p_a:
        given = f"An effect of {effect} cannot happen at pass rate {p_a} and discordance {discordance}"
        raise UsageError(
            f"{given}: it is at most {largest:.3f}, and no more tasks are lost than were passed. Change one."
        )
    tasks = int(num_tasks / design_effect)
    found = mcnemar_power(tasks, discordance, effect)
    needed = ceil(needed_tasks(discordance, effect) * design_effect)
    mde = detectable_effect(tasks, discordance, largest)
    return Power(num_tasks, effect, discordance, design_effect, found, mde, needed)


def largest_effect(p_a: float, discordance: float) -> float:
    """The largest gain: (discordance + gain) / 2 of the tasks are won, and only the 1 - p_a that failed can be."""
    return 1 - p_a if discordance <= 1 - p_a else 2 * (1 - p_a) - discordance


def kish_design_effect(family_size: float, correlation: float, num_samples: int = 1, noise_share: float = 0.0) -> float:
    """Variance of the mean difference relative to independent tasks: families (Kish: 1 + (m - 1) rho) and K samples.

    `correlation` is that of the task differences within a family, `noise_share` the part of their variance that is
    sampling noise, which K samples a task divide by K.
    """
    return (1 + (family_size - 1) * correlation) * (1 - noise_share + noise_share / num_samples)


def mcnemar_power(num_tasks: int, discordance: float, effect: float) -> float:
    """Probability that the two-sided exact McNemar test finds a gain of `effect`, over D discordant tasks."""
    from scipy.stats import binom

    discordance = max(discordance, effect)
    num_D = np.arange(binom.ppf(1e-9, num_tasks, discordance), binom.isf(1e-9, num_tasks, discordance) + 1)
    fewest_wins_D = binom.isf(ALPHA / 2, num_D, 0.5) + 1
    found_D = binom.sf(fewest_wins_D - 1, num_D, (discordance + effect) / (2 * discordance))
    return float((binom.pmf(num_D, num_tasks, discordance) * found_D).sum())


def detectable_effect(num_tasks: int, discordance: float, largest: float) -> float | None:
    """The smallest effect up to `largest` found with 80 % power, to 1e-4; None if there is none."""
    if mcnemar_power(num_tasks, discordance, largest) < POWER:
        return None
    low, high = 0.0, largest
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if mcnemar_power(num_tasks, discordance, middle) >= POWER else (middle, high)
    return high


def needed_tasks(discordance: float, effect: float) -> int:
    """The number of tasks that gives 80 % power, to within the ripple of an exact test."""
    low, high = 0, 1
    while mcnemar_power(high, discordance, effect) < POWER:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if mcnemar_power(middle, discordance, effect) >= POWER else (middle, high)
    return high
