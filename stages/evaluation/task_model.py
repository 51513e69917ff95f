"""The task model of a planned evaluation: which rates rollouts have, and which correlations follow from them.

A rollout passes when a latent difficulty of its task plus chance exceeds a threshold (a probit model), so that four
measurable rates fix everything: the baseline's pass rate, how often two rollouts of one model on one task differ, how
often rollouts of the two arms differ, and how much of difficulty is shared within a family. The gain of a training is
normal about the true one.
"""

from dataclasses import dataclass
from functools import cache
from math import asin, pi
from statistics import NormalDist

import numpy as np

from composer_stages.errors import UsageError

normal_quantile = NormalDist().inv_cdf
NODES, WEIGHTS = np.polynomial.legendre.leggauss(48)
"""Of the Gauss-Legendre quadrature over the angle of a correlation."""
PILOT, ASSUMED, GIVEN, UNTRAINED = "pilot", "assumed", "given", "untrained"
Rates = dict[str, tuple[float, str]]
"""A rate and its source (`PILOT`, `ASSUMED`, `GIVEN` or `UNTRAINED`), by the name of its field in `TaskModel`."""


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


def task_model(rates: Rates) -> TaskModel:
    """Return the task model of complete rates."""
    return TaskModel(**{name: value for name, (value, _) in rates.items()})


def chance_of_difference(first: float, second: float) -> float:
    """Return how often one of two independent outcomes with these rates passes and the other fails."""
    return first + second - 2 * first * second


def correlation_of(first: float, second: float, both: float) -> float:
    """Return the latent correlation, 0..1, under which two outcomes with these rates both pass so often.

    The nearest correlation where none gives `both`.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if chance_of_both(first, second, middle) < both else (low, middle)
    return high


def chance_of_both(first: float, second: float, correlation: float) -> float:
    """Return how often two outcomes with these rates both pass, where their latent variables are so correlated.

    The bivariate normal distribution as an integral over the angle of the correlation (Plackett, Biometrika 1954).
    """
    if correlation >= 1 - 1e-9:
        return min(first, second)
    h, k = normal_quantile(first), normal_quantile(second)
    half = asin(correlation) / 2
    sine = np.sin(half * (1 + NODES))
    density = np.exp(-(h**2 + k**2 - 2 * h * k * sine) / (2 * (1 - sine**2)))
    return first * second + half * float(WEIGHTS @ density) / (2 * pi)


@cache
def latent_correlations(model: TaskModel, gain: float) -> tuple[float, float]:
    """Return the latent correlations of two rollouts of one task, and of the arms' difficulties.

    Raises `UsageError` where the rates contradict each other.
    """
    reached = model.pass_rate + gain
    rates = {"pass_rate": model.pass_rate, "reached": reached}
    if not (0 < model.pass_rate < 1 and 0 < reached < 1):
        raise UsageError("evaluation.impossible-pass-rate", gain=gain, **rates)
    same = chance_of_difference(model.pass_rate, model.pass_rate)
    chance = chance_of_difference(model.pass_rate, reached)
    if not 0 < model.samples_differ <= same + 1e-9:
        raise UsageError(
            "evaluation.impossible-samples-differ",
            differing=model.samples_differ,
            pass_rate=model.pass_rate,
            chance=same,
        )
    if not abs(gain) <= model.arms_differ <= chance + 1e-9:
        raise UsageError(
            "evaluation.impossible-arms-differ", differing=model.arms_differ, gain=gain, chance=chance, **rates
        )
    same_task = correlation_of(model.pass_rate, model.pass_rate, model.pass_rate - model.samples_differ / 2)
    across = correlation_of(model.pass_rate, reached, (model.pass_rate + reached - model.arms_differ) / 2)
    return same_task, min(across / max(same_task, 1e-9), 1.0)
