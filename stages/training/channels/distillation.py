"""The channels that learn a distribution: of the student itself behind a hint, or of a teacher model."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.training.channels.base import Channel, ChannelLoss, ChannelSettings, Metric, State

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from stages.training.data import EpisodeRows
    from stages.training.hints import HintedRows


class Sdpo(Channel["HintedRows"]):
    """Self-distillation: mean divergence (nats) over the tokens of hinted turns.

    Kernel: stages/losses/distillation.py.
    """

    name = "sdpo"
    description = "Self-distillation: the model's own hint-conditioned distribution teaches it at the faulty turn."
    row_source = "hinted"

    def loss(self, rows: "HintedRows") -> ChannelLoss:
        """Return the loss; metrics are the number of hinted turns and the largest divergence of a token (nats)."""
        import torch

        from stages.losses.distillation import importance_weights, sdpo

        hints, weights = self.settings.hints, rows.mean_weights
        if hints.importance_clip is not None:
            # The weights carry no gradient, so this second pass through the output head needs no graph.
            with torch.no_grad():
                logps = rows.student_logps(self.settings.temperature)
            weights = weights * importance_weights(logps, rows.sampled_logps, hints.importance_clip)
        loss, per_token = sdpo(
            rows.student,
            rows.taught,
            weights,
            alpha=hints.alpha,
            top_k=hints.top_k,
            outside="tail" if hints.tail else "renormalised",
            temperature=self.settings.temperature,
        )
        turns = Metric("sum", len(rows.rows))
        metrics = {"turns": turns, "divergence_max": Metric("max", per_token.max())}
        return ChannelLoss(loss, rows.tokens, metrics)


class Taid(Channel["EpisodeRows"]):
    """TAID: mean over the student's own tokens. Kernel, schedule and source: stages/losses/distillation.py.

    The schedule is the channel's state; it moves once a step of training, where upstream moves it once a micro-batch.
    """

    name = "taid"
    description = (
        "Distillation towards a target that moves from the student to a teacher model, on the student's own actions."
    )
    row_source = "episodes"
    needs_teacher = True

    def __init__(self, settings: ChannelSettings) -> None:
        from stages.losses.distillation import TaidSchedule

        super().__init__(settings)
        self._schedule = TaidSchedule(**settings.taid.model_dump())
        self._state = self._schedule.start()

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Return the loss; the metric t is the position of the target between student (0) and teacher (1)."""
        from stages.losses.distillation import taid

        t = float(self._state.t)  # constant within a step: `end_step` alone moves it, so that parts add up
        total = taid(rows.student, rows.teacher, rows.own, t)
        return ChannelLoss(total / rows.tokens, rows.tokens, {"t": Metric("max", t)})

    def end_step(self, loss: "Float[Tensor, '']", step: int) -> None:
        """Move the schedule by the loss of the step."""
        from stages.losses.distillation import advance

        # The schedule is on the host, where its comparisons wait for nothing.
        self._state, _ = advance(self._schedule, self._state, loss.cpu(), step, self.settings.num_steps)

    def state(self) -> State:
        """Return the schedule's state as JSON; None is the infinite loss before the first step, which JSON lacks."""
        values = {name: float(getattr(self._state, name)) for name in ("t", "prev_loss", "momentum")}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def load(self, state: State) -> None:
        """Continue the schedule from `state`, as the last complete step left it."""
        import torch

        values = {name: torch.tensor(math.inf if value is None else value) for name, value in state.items()}
        self._state = replace(self._state, **values)


class Eopd(Channel["EpisodeRows"]):
    """EOPD: mean over the student's own tokens, log-probs at sampling temperature.

    Kernel: stages/losses/distillation.py.
    With a teacher behind a server the loss is the policy gradient alone: a server returns the log-probs of the tokens
    that the student wrote, and the forward KL would need its whole distribution.
    """

    name = "eopd"
    description = "Entropy-aware on-policy distillation from a teacher model, on the student's own actions."
    row_source = "episodes"
    needs_teacher = True

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Return the loss; metrics are means in nats or shares of tokens, named as upstream without "actor/".

        Of all own tokens: rev_kl, avg_teacher_advantage, avg_teacher_log_prob, avg_student_log_prob, ppo_kl,
        pg_clipfrac, pg_clipfrac_lower. With a teacher in this process also soft_kd_loss, soft_kd_token_ratio and
        soft_kd_high_entropy_ratio; and over the tokens of high teacher entropy or with a forward KL,
        soft_kd_avg_high_entropy, high_entropy_avg_kl, soft_kd_avg_kl, and how many there were (soft_kd_num_*).
        """
        from stages.losses.distillation import EopdOptions, eopd, reverse_kl_from_log_probs

        settings = self.settings.eopd
        if rows.teacher_logps is not None:
            loss, totals = reverse_kl_from_log_probs(
                rows.student_logps(self.settings.temperature),
                rows.sampled_logps,
                rows.teacher_logps,
                rows.own,
                num_tokens=rows.tokens,
            )
            return ChannelLoss(loss, rows.tokens, {name: Metric("mean", *total) for name, total in totals.items()})
        loss, totals = eopd(
            rows.student,
            rows.teacher,
            rows.targets,
            rows.sampled_logps,
            rows.own,
            num_tokens=rows.tokens,
            top_k=settings.top_k,
            temperature=self.settings.temperature,
            options=EopdOptions(coef=settings.coefficient, entropy_threshold=settings.entropy_threshold),
        )
        # Upstream logs these numbers of tokens too; each is the denominator of a mean that is already here.
        counts = {"soft_kd_num_tokens": "soft_kd_avg_kl", "soft_kd_num_high_entropy": "high_entropy_avg_kl"}
        metrics = {name: Metric("mean", *total) for name, total in totals.items()}
        metrics |= {name: Metric("sum", totals[mean][1]) for name, mean in counts.items()}
        return ChannelLoss(loss, rows.tokens, metrics)
