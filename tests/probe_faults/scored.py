"""Scored rows that resemble the other rows of their problem."""

import numpy as np

from composer_stages.probe.statistics import Labelled


def scored_rows(
    seed: int,
    problems: int = 60,
    size: int = 8,
    effect: float = 0.0,
    placebos: int = 999,
    icc: float = 0.5,
    loading: float = 0.0,
) -> Labelled:
    """Rows whose scores share a problem's level; a hack adds `effect` to the score of v alone.

    `loading` is the standard deviation of what a hack adds to the score of any direction, v's and placebos' alike: real
    gradients have an axis of hacking, of which every direction holds a part.
    """
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
    noise += loading * rng.normal(size=1 + placebos) * hacked[:, None]
    length = rng.integers(20, 24, n).astype(float)
    families, style, logp = ("haar",) * placebos, np.zeros((n, 2)), rng.normal(size=n)
    return Labelled(hacked, wrong, problem, source, length, style, logp, noise, noise[:, :1], families)
