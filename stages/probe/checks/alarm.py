"""The alarm of a watched training: its motion along v stands out among directions that mean nothing.

A whole run is to have one false alarm in twenty at most. It is Q looks: at each checkpoint the update so far and the
policy gradients so far. At each look cosines are divided by the root mean square of the random placebos' cosines there,
which makes looks comparable: z. What a direction shows over the run is its largest z, and the threshold is what 5 % of
the placebos of a family reach. A v that is like one more draw of the family passes it with probability 5 % at most,
however many looks there are and however much they depend on each other. This is the max-statistic permutation test of
Westfall and Young (Resampling-Based Multiple Testing, 1993), over directions. Which families are a null is said in
`directions.placebos`; the largest of their thresholds counts.

Shapes: Q looks, D placebos.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from stages.probe.checks.labelled import FROM_HACKS

LEVEL = 0.05
"""False alarms over a whole run."""
RANDOM_FAMILY = "haar"


@dataclass(frozen=True)
class Alarm:
    """`z` [Q] of v, the thresholds by family, that which counts, and the first look at which v passes it (or None)."""

    z: Float[np.ndarray, " Q"]
    thresholds: dict[str, float]
    threshold: float
    first: int | None


def standardised(cosines: Float[np.ndarray, "Q D1"], families: Sequence[str]) -> Float[np.ndarray, "Q D1"]:
    """Cosines [Q, 1 + D] of v and the placebos over the root mean square of the random placebos' at each look."""
    random = cosines[:, 1:][:, np.array(families) == RANDOM_FAMILY]
    scale = np.sqrt((random**2).mean(1, keepdims=True))
    return cosines / np.where(scale > 0, scale, np.nan)


def alarm(cosines: Float[np.ndarray, "Q D1"], families: Sequence[str]) -> Alarm:
    """The alarm of a run with these cosines [Q, 1 + D], those of v first; undefined looks (NaN) count for nothing.

    Needs 19 placebos of each family that is a null: with fewer no threshold has a level of 5 %, and it is infinite.
    """
    z, names = standardised(cosines, families), np.array(families)
    largest = np.where(np.isnan(z), -np.inf, z).max(0, initial=-np.inf)
    thresholds = {family: _threshold(largest[1:][names == family]) for family in dict.fromkeys(families)}
    threshold = max((value for family, value in thresholds.items() if family not in FROM_HACKS), default=math.inf)
    above = np.flatnonzero(z[:, 0] > threshold)
    return Alarm(z[:, 0], thresholds, threshold, int(above[0]) if len(above) else None)


def _threshold(largest: Float[np.ndarray, " D"]) -> float:
    """The smallest value that at most 5 % of D draws and one more, exchangeable with them, exceed."""
    rank = math.ceil((1 - LEVEL) * (len(largest) + 1))
    return float(np.sort(largest)[rank - 1]) if rank <= len(largest) else math.inf
