"""Planned looks at an evaluation that is still going on, so that it can end when it is decided.

Looking often and stopping at the first small p finds something in nothing. The looks of O'Brien and Fleming
(Biometrics 1979) are hard to pass early and nearly the full test at the last: the sum of outcomes is compared with
one bound at every look. The intervals at these levels are repeated confidence intervals (Jennison and Turnbull, JRSS
B 1989): all of them hold the truth together with probability 1 - alpha, so one may stop at any look, for any reason,
and go on after a decision, and the interval at hand is as good as it says. Looks are spaced equally over tasks. Where
outcomes cluster in families or training seeds, early looks know more than their share of tasks, so looks are more
alike than the bound assumes, and it errs on the safe side.
"""

from functools import cache
from itertools import pairwise

import numpy as np

from stages.evaluation.stats import ALPHA

GRID = 101
"""Points of a normal path's density; the bound is right to 1e-4."""


@cache
def levels(num_looks: int, alpha: float = ALPHA) -> tuple[float, ...]:
    """The two-sided level of each look; a test that passes at any of them has level `alpha` over all."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    if num_looks == 1:
        return (alpha,)
    bound = brentq(lambda c: crossing(c * np.sqrt(num_looks), num_looks) - alpha, 1.0, 4.0, xtol=1e-6)
    return tuple(float(2 * norm.sf(bound * np.sqrt(num_looks / look))) for look in range(1, num_looks + 1))


def crossing(bound: float, num_looks: int) -> float:
    """How probable it is that a walk of standard normal steps ever leaves [-bound, bound]."""
    from scipy.stats import norm

    at, weight = (nodes * bound for nodes in np.polynomial.legendre.leggauss(GRID))
    step = norm.pdf(at[:, None] - at[None]) * weight[None]
    density = norm.pdf(at)
    for _ in range(num_looks - 1):
        density = step @ density
    return float(1 - density @ weight)


def parts(num_tasks: int, num_looks: int) -> list[range]:
    """The tasks that each look adds: as equal in number as whole tasks allow, none of them empty."""
    ends = [round(num_tasks * look / num_looks) for look in range(num_looks + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]
