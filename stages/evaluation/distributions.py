"""The normal and Student's t distribution, for arrays of a few thousand values.

scipy has them, too, at 143 MB and more time to import than a comparison takes; the probe, which needs millions of
values, uses scipy.
"""

import functools
import math

import numpy as np

Array = np.ndarray
TINY, MAX_TERMS = 1e-300, 10_000


def normal_cdf(z: Array | float) -> Array:
    """Return the probability that a standard normal value is at most z."""
    return np.asarray(np.vectorize(math.erfc, otypes=[float])(np.asarray(z) / -math.sqrt(2)) / 2)


@functools.partial(np.vectorize, otypes=[float])
def student_cdf(df: float, t: float) -> float:
    """Return the probability that a value of Student's t with `df` degrees of freedom is at most t."""
    tail = _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t)) / 2
    return tail if t < 0 else 1 - tail


@functools.partial(np.vectorize, otypes=[float])
@functools.lru_cache(4096)  # bisection asks for the same levels again and again
def student_quantile(df: float, p: float) -> float:
    """Return the value that Student's t with `df` degrees of freedom exceeds with probability 1 - p, for p >= 1/2.

    By Newton's method in the angle atan(t / sqrt(df)): there the distribution is concave, so that no step from the
    middle passes the root.
    """
    density = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle, step = 0.0, 1.0
    while step > 1e-14 and angle < math.pi / 2:
        step = (p - float(student_cdf(df, math.sqrt(df) * math.tan(angle)))) / (density * math.cos(angle) ** (df - 1))
        angle += step
    return math.sqrt(df) * math.tan(angle)


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularised incomplete beta function at x = 1 - rest: its continued fraction, by Lentz's method.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.5.8; it converges fast below (a + 1) / (a + b + 2).
    """
    if x <= 0 or rest <= 0:
        return float(x > 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, rest, x)
    found, upper, lower = 1.0, 1.0, 0.0
    for term in range(MAX_TERMS):
        m = term // 2
        if term == 0:
            share = 1.0
        elif term % 2:
            share = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            share = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + share * lower) or TINY)
        upper = (1 + share / upper) or TINY
        found *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    return math.exp(scale) * (found - 1) / a
