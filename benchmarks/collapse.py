"""How often `train` warns of a collapse where there is none, and after how many steps it warns of a real one.

    python benchmarks/collapse.py [--trainings 400]

Simulated trainings of 200 steps, groups of 8: tasks of Beta-distributed difficulty, alike (concentration 4) or mostly
all-or-nothing (1), with pass rates from .05 to .9 and 1, 2 or 8 prompts a step; entropy and length fall slowly, with a
noise of 20 % a step. In a collapse all rewards are 0 from step 41, or entropy grows by a tenth a step from then on.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from itertools import product

import cases
import numpy as np
from records import Claim, measured

from stages.training.collapse import ENTROPY, LENGTH, PROTOCOL, REWARD, Course

GENERATIONS, HEALTHY, FALL = 8, 200, 40
RATES, PROMPTS, CONCENTRATIONS = (0.05, 0.1, 0.3, 0.6, 0.9), (1, 2, 8), (4.0, 1.0)


def rewards(rate: float, prompts: int, concentration: float, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return the mean reward of each step: prompts of Beta-distributed difficulty, each played by a group."""
    tasks = random.beta(rate * concentration, (1 - rate) * concentration, (steps, prompts))
    return random.binomial(GENERATIONS, tasks).mean(1) / GENERATIONS


def slowly(first: float, steps: int, random: np.random.Generator) -> np.ndarray:
    """Return a metric that falls to two thirds, with a noise of 20 % a step."""
    return first * np.linspace(1, 2 / 3, steps) * random.normal(1, 0.2, steps).clip(0.3)


def fires(rewards: np.ndarray, entropy: np.ndarray, random: np.random.Generator, prompts: int) -> int | None:
    """Return the step that warns, None where none does."""
    course = Course(prompts * GENERATIONS)
    length, protocol = slowly(40, len(rewards), random), random.binomial(prompts * GENERATIONS, 0.95, len(rewards))
    for step, values in enumerate(zip(rewards, entropy, length, protocol / (prompts * GENERATIONS), strict=True), 1):
        if course.add(dict(zip((REWARD, ENTROPY, LENGTH, PROTOCOL), map(float, values), strict=True))):
            return step
    return None


def levels(trainings: int = 400) -> Iterator[Claim]:
    """False alarms of healthy trainings, and steps until a collapse is noticed, by pass rate and prompts a step."""
    random, false, late = np.random.default_rng(0), [], {"rewards of 0": [], "growing entropy": []}
    designs = list(product(RATES, PROMPTS, CONCENTRATIONS))
    for rate, prompts, concentration in designs:
        for _ in range(trainings):
            healthy = rewards(rate, prompts, concentration, HEALTHY, random)
            false.append(fires(healthy, slowly(1.0, HEALTHY, random), random, prompts) is not None)
            gone = np.where(np.arange(HEALTHY) < FALL, healthy, 0.0)
            growing = slowly(1.0, HEALTHY, random) * 1.1 ** (np.arange(HEALTHY) - FALL).clip(0)
            for name, rewarded, entropy in (
                ("rewards of 0", gone, slowly(1.0, HEALTHY, random)),
                ("growing entropy", healthy, growing),
            ):
                step = fires(rewarded, entropy, random, prompts)
                if rate >= 0.3 and prompts > 1:
                    late[name].append(HEALTHY if step is None else step - FALL)
    yield measured(
        f"false alarms of {HEALTHY} healthy steps, {len(designs)} layouts", 100 * np.mean(false), n=len(false), unit="%"
    )
    for name, steps in late.items():
        claim = f"steps from {name} to the warning, pass rate 30 % and above, 2 prompts a step and more"
        between = tuple(map(float, np.percentile(steps, (2.5, 97.5))))
        yield measured(claim, float(np.median(steps)), between, n=len(steps), unit="steps")


CASES = {"levels": levels}


if __name__ == "__main__":
    cases.main(__file__, CASES)
