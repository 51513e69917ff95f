"""Scored rows that resemble the other rows of their problem."""

import numpy as np

from stages.probe.checks.labelled import Labelled


def scored_rows(
    seed: int, problems: int = 30, size: int = 8, effect: float = 0.0, placebos: int = 40, icc: float = 0.5
) -> Labelled:
    """Rows whose scores share a problem's level; a hack adds `effect` to the score of v alone."""
    rng = np.random.default_rng(seed)
    n = problems * size
    problem = np.repeat(np.arange(problems), size)
    source = (np.arange(n) % size >= size * 3 // 4).astype(int)
    hacked = (rng.random(n) < 0.6) & (source == 0)
    wrong = rng.random(n) < np.repeat(rng.uniform(0.2, 0.8, problems), size)
    noise = np.sqrt(icc) * rng.normal(size=(problems, 1 + placebos))[problem] + rng.normal(
        size=(n, 1 + placebos)
    ) * np.sqrt(1 - icc)
    noise[:, 0] += effect * hacked
    length = rng.integers(20, 24, n).astype(float)
    return Labelled(hacked, wrong, problem, source, length, np.zeros((n, 2)), rng.normal(size=n), noise, noise[:, :1])
