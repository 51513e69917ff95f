"""Dr.GRPO's loss by rows, with the true behaviour log-probs, and whether its ratios still let it learn from its rows.

L = -1 / (N Lmax) sum_i sum_t min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) over own tokens, rho = pi / behaviour,
A = R - mean R of the group, not divided by its spread (Dr.GRPO, arXiv 2503.20783). At rho = 1 a row's gradient is A_i
times that of its token-sum NLL, divided by N Lmax.

Shapes: B rows, T tokens, own: a row's own tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stages.probe.gradients.per_sample import RowLoss
from stages.probe.gradients.student import LossOf
from stages.probe.pool.tokens import Batch

EPSILON = 0.2
"""The clip range of Dr.GRPO."""
VANISHED = 0.1
"""Below this ratio a token of positive advantage has next to no gradient."""
MAX_LOST = 0.5
MIN_ESS = 0.2


def dr_grpo(
    advantages: Sequence[float], behaviour: Sequence[Float[Tensor, " own"]] | None, l_max: int, num_rows: int
) -> LossOf:
    """The loss of `num_rows` rows with these advantages; without behaviour log-probs [nats] the ratio is 1.

    A ratio of 1 still has its gradient. `l_max` is Dr.GRPO's constant Lmax, in tokens.
    """

    def loss_of(indices: list[int], batch: Batch) -> RowLoss:
        scale = torch.tensor([advantages[i] for i in indices], device=batch.ids.device)[:, None]
        old = None if behaviour is None else _dense([behaviour[i] for i in indices], batch)

        def loss(logps: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
            ratio = (logps - (logps.detach() if old is None else old)).exp()
            kept = torch.minimum(ratio * scale, ratio.clamp(1 - EPSILON, 1 + EPSILON) * scale)
            return -(kept * batch.own).sum(-1) / (num_rows * l_max)

        return loss

    return loss_of


def _dense(rows: Sequence[Float[Tensor, " own"]], batch: Batch) -> Float[Tensor, "B T"]:
    dense = torch.zeros(batch.ids.shape, device=batch.ids.device)
    dense[batch.own] = torch.cat(list(rows)).to(dense)
    return dense


@dataclass(frozen=True)
class RatioReport:
    """How much of the data importance ratios leave without use: clipped and vanished tokens, effective sample size.

    clip_low, clip_high and vanish are shares of the own tokens of rows with an advantage: A < 0 and rho < 1 - eps;
    A > 0 and rho > 1 + eps; A > 0 and rho < .1. p5 to mean are of all own tokens' ratios. The mean says nothing: it is
    1 by construction when the current log-probs stand in for the old ones. ess is (sum w)^2 / sum w^2 / B, with w the
    product of a row's ratios.
    """

    clip_low: float
    clip_high: float
    vanish: float
    ess: float
    p5: float
    p50: float
    p95: float
    mean: float

    @property
    def saturated(self) -> str | None:
        """Why to stop, in words; None while the ratios still carry a signal."""
        lost = self.clip_low + self.clip_high + self.vanish
        if lost > MAX_LOST:
            return f"{lost:.0%} of the tokens are clipped or vanish"
        return f"the effective sample size is {self.ess:.0%} of the rows" if self.ess < MIN_ESS else None


def ratio_report(
    current: Sequence[Float[Tensor, " own"]], behaviour: Sequence[Float[Tensor, " own"]], advantages: Sequence[float]
) -> RatioReport:
    """The report on rows' log-probs [nats] now and when they were sampled; advantage 0 counts for the ess alone."""
    log_ratios = [new - old for new, old in zip(current, behaviour, strict=True)]
    ratios = [log_ratio.exp() for log_ratio in log_ratios]
    learned = [(rho, a) for rho, a in zip(ratios, advantages, strict=True) if a]
    total = max(sum(len(rho) for rho, _ in learned), 1)
    log_weights = torch.stack([log_ratio.sum() for log_ratio in log_ratios]).double()
    weights = (log_weights - log_weights.max()).exp()
    tokens = torch.cat(ratios)
    p5, p50, p95 = tokens.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return RatioReport(
        clip_low=sum(int((rho < 1 - EPSILON).sum()) for rho, a in learned if a < 0) / total,
        clip_high=sum(int((rho > 1 + EPSILON).sum()) for rho, a in learned if a > 0) / total,
        vanish=sum(int((rho < VANISHED).sum()) for rho, a in learned if a > 0) / total,
        ess=float(weights.sum() ** 2 / weights.square().sum()) / len(weights),
        p5=p5,
        p50=p50,
        p95=p95,
        mean=float(tokens.mean()),
    )
