"""Where a LoRA's gradient is, and whether its basis stays.

At B = 0, where PEFT starts, the gradient of A is exactly 0, so features are those of B alone, as in GRIFT (arXiv
2604.16242).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from stages.probe.adapters.lora import A_HALF
from stages.probe.checks.check import Check, judged
from stages.probe.directions.extraction import Direction
from stages.runs.records import Row

MIN_OVERLAP = 0.5


def b_is_probed(sums: Float[Tensor, "B N"], direction: Direction) -> Check:
    """At B = 0 every gradient of an A is exactly 0, as it must be, and v lies on the Bs, with a norm in each."""
    parts = direction.layout.split(sums)
    halves = [name for name in parts if name.endswith(A_HALF)]
    largest = max((float(parts[name].abs().max()) for name in halves), default=0.0)
    on_a = [name for name in direction.modules if name.endswith(A_HALF)]
    bare = [name for name in parts if not name.endswith(A_HALF) and name not in direction.modules]
    faults = (
        ("gradients of A are not 0", largest > 0),
        (f"v has {len(on_a)} modules on A", bool(on_a)),
        (f"{len(bare)} Bs without v", bool(bare)),
    )
    shown = [text for text, faulty in faults if faulty]
    detail = ", ".join(shown) or f"{len(halves)} halves A, {len(direction.modules)} modules of v"
    return Check("lora-B", "R6", judged(not shown), largest, "max |dA| = 0, v on B only", detail)


def basis_stays(steps: Sequence[Row]) -> Check:
    """The row space of A keeps half of itself, and what projection leaves behind does not grow back over the steps."""
    overlap = min((step["basis_overlap"] for step in steps), default=float("nan"))
    p = return_p(
        [step["cos_in"] - step["cos_out"] for step in steps if step["cos_in"] is not None and step["frac_fired"] > 0]
    )
    returns = "" if p is None else f"; removal fading at p {p:.2g}"
    threshold = f"overlap with the start >= {MIN_OVERLAP}"
    return Check("basis", "R6", judged(overlap >= MIN_OVERLAP), overlap, threshold, f"{len(steps)} steps{returns}")


def return_p(gaps: Sequence[float]) -> float | None:
    """One-sided p of a falling trend (Kendall's tau) of what is removed; None with fewer than four steps."""
    from scipy.stats import kendalltau

    if len(gaps) < 4 or np.ptp(gaps) == 0:
        return None
    return float(kendalltau(range(len(gaps)), gaps, alternative="less").pvalue)
