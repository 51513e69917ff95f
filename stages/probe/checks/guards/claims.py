"""The claim rests on v: v negated and the generic gradient do not pass, and v is another direction than theirs.

Both controls, and the bound on the cosine, are this project's own.
"""

from dataclasses import replace

import numpy as np

from stages.probe.checks.check import Check, judged
from stages.probe.checks.contrast_checks import Draws, factorial
from stages.probe.checks.labelled import Labelled
from stages.probe.directions.extraction import Direction, LossKind, PairGradients
from stages.probe.directions.scoring import generic_gradient

MAX_COSINE = 0.5


def specific(rows: Labelled, controls: dict[str, np.ndarray], draws: Draws) -> Check:
    """T4e does not pass for control directions; `controls` holds the scores [n] of the same rows under each."""
    passed = []
    for name, scores in controls.items():
        swapped = replace(rows, scores=np.column_stack([scores, rows.scores[:, 1:]]))
        if factorial(swapped, draws).passed:
            passed.append(name)
    shown = "; ".join(f"{name} passes T4e" for name in passed) or "T4e fails for " + ", ".join(controls)
    return Check("specific", "R4", judged(not passed), float(len(passed)), "T4e fails for every control", shown)


def not_generic(direction: Direction, pairs: PairGradients, loss: LossKind) -> Check:
    """The cosine of v with the direction in which any answer pulls, the mean gradient of clean ones, is small."""
    cosine = float(generic_gradient(direction, pairs, loss) @ direction.unit) / len(direction.modules)
    detail = "against the mean gradient of clean answers"
    threshold = f"|cos(v, generic)| <= {MAX_COSINE}"
    return Check("generic", "R4", judged(abs(cosine) <= MAX_COSINE), cosine, threshold, detail)
