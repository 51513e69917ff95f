"""The channels that learn a distribution: of the student itself behind a hint, or of a teacher model."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.training.channels.base import Channel, ChannelLoss, ChannelSettings, State

if TYPE_CHECKING:
    from torch import Tensor

    from stages.training.rows import EpisodeRows, HintedRows

EOPD_TOP_K = 128
"""The teacher's most likely tokens that EOPD's forward KL is taken over."""


class Sdpo(Channel["HintedRows"]):
    """Self-distillation: mean divergence (nats) over the tokens of faulty turns.

    Kernel and source: stages/losses/sdpo.py.
    """

    name = "sdpo"
    description = "Self-distillation: the model's own hint-conditioned distribution teaches it at the faulty turn."
    row_source = "hinted"

    def loss(self, rows: "HintedRows") -> ChannelLoss:
        """Metrics: number of hinted turns, largest divergence of a token (nats)."""
        from stages.losses.sdpo import self_distillation_loss

        loss, per_token = self_distillation_loss(
            rows.student_logits,
            rows.teacher_logits,
            rows.mean_weights,
            alpha=self.settings.hints.alpha,
            top_k=self.settings.hints.top_k,
            temperature=self.settings.temperature,
        )
        return ChannelLoss(loss, rows.tokens, {"turns": len(rows.turns), "divergence_max": float(per_token.max())})


class Taid(Channel["EpisodeRows"]):
    """TAID: mean over the student's own tokens. Kernel, schedule and source: stages/losses/taid.py.

    The schedule is the channel's state; it moves with every call in training.
    """

    name = "taid"
    description = (
        "Distillation towards a target that moves from the student to a teacher model, on the student's own actions."
    )
    row_source = "episodes"
    needs_teacher = True

    def __init__(self, settings: ChannelSettings) -> None:
        from stages.losses.taid import TaidSchedule

        super().__init__(settings)
        self._schedule = TaidSchedule()
        self._state = self._schedule.start()

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Metric: t, the place of the target between student (0) and teacher (1) in this call."""
        from stages.losses.taid import advance, taid_loss

        t = float(self._state.t)
        loss = taid_loss(rows.student_logits, rows.teacher_logits, rows.own, self._state.t, min_tokens=1)
        if rows.training:
            self._state, _ = advance(self._schedule, self._state, loss, rows.step, self.settings.num_steps)
        return ChannelLoss(loss, rows.tokens, {"t": t})

    def state(self) -> State:
        """The schedule's state; None stands for the infinite loss before the first call."""
        values = {name: float(getattr(self._state, name)) for name in ("t", "prev_loss", "momentum")}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def load(self, state: State) -> None:
        """Continue from `state`."""
        import torch

        values = {name: torch.tensor(math.inf if value is None else value) for name, value in state.items()}
        self._state = replace(self._state, **values)


class Eopd(Channel["EpisodeRows"]):
    """EOPD: mean over the student's own tokens, log-probs at sampling temperature.

    Kernel and source: stages/losses/eopd.py.
    """

    name = "eopd"
    description = "Entropy-aware on-policy distillation from a teacher model, on the student's own actions."
    row_source = "episodes"
    needs_teacher = True

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Metrics: those of the kernel, without their prefix `actor/`."""
        from stages.losses.eopd import eopd_loss, soft_targets

        student, teacher, temperature = rows.student_logits, rows.teacher_logits, self.settings.temperature
        logps, teacher_logps = (self._log_probs(logits, rows.targets) for logits in (student, teacher))
        soft = soft_targets(student, teacher, top_k=min(EOPD_TOP_K, student.shape[-1]), temperature=temperature)
        loss, metrics = eopd_loss(logps, rows.sampled_logps, teacher_logps, rows.own, soft, min_tokens=1.0)
        named = {name.removeprefix("actor/"): float(value) for name, value in metrics.items()}
        return ChannelLoss(loss, rows.tokens, named)

    def _log_probs(self, logits: "Tensor", ids: "Tensor") -> "Tensor":
        """Natural log-probs [1, N] of given tokens [1, N] from logits [1, N, V], in float32."""
        scaled = logits.float() / self.settings.temperature
        return scaled.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
