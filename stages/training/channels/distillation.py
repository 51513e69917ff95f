"""The channels that learn a distribution: of the student itself behind a hint, or of a teacher model."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.training.channels.base import Channel, ChannelLoss, ChannelSettings, Max, Mean, State, Sum

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from stages.training.data import EpisodeRows
    from stages.training.hints import HintedRows


class Sdpo(Channel["HintedRows"]):
    """Self-distillation: mean divergence (nats) over the tokens of faulty turns.

    Kernel: stages/losses/sdpo.py; source: stages/losses/sdpo.py.
    """

    name = "sdpo"
    description = "Self-distillation: the model's own hint-conditioned distribution teaches it at the faulty turn."
    row_source = "hinted"

    def loss(self, rows: "HintedRows") -> ChannelLoss:
        """Metrics: number of hinted turns, largest divergence of a token (nats)."""
        from stages.losses.sdpo import importance_weights, sdpo_from_hidden

        hints, weights = self.settings.hints, rows.mean_weights
        if hints.importance_clip is not None:
            logps = rows.student_logps(self.settings.temperature)
            weights = weights * importance_weights(logps, rows.sampled_logps, hints.importance_clip)
        loss, per_token = sdpo_from_hidden(
            rows.student,
            rows.taught,
            weights,
            alpha=hints.alpha,
            top_k=hints.top_k,
            add_tail=hints.tail,
            temperature=self.settings.temperature,
        )
        metrics = {"turns": Sum(len(rows.turns)), "divergence_max": Max(float(per_token.max()))}
        return ChannelLoss(loss, rows.tokens, metrics)


class Taid(Channel["EpisodeRows"]):
    """TAID: mean over the student's own tokens. Kernel, schedule and source: stages/losses/taid.py.

    The schedule is the channel's state; it moves once a step of training, where upstream moves it once a micro-batch.
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
        self._schedule = TaidSchedule(**settings.taid.model_dump())
        self._state = self._schedule.start()

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Metric: t, the place of the target between student (0) and teacher (1) in this step."""
        from stages.losses.taid import taid_from_hidden

        t = float(self._state.t)
        total = taid_from_hidden(rows.student, rows.teacher, rows.own[0], t)
        return ChannelLoss(total / rows.tokens, rows.tokens, {"t": Max(t)})

    def end_step(self, loss: "Float[Tensor, '']", step: int) -> None:
        """Move the schedule by the loss of the step."""
        from stages.losses.taid import advance

        self._state, _ = advance(self._schedule, self._state, loss, step, self.settings.num_steps)

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

    Of a teacher behind a server the policy gradient alone, by its log-probs of the student's tokens. Kernel and source:
    stages/losses/eopd.py.
    """

    name = "eopd"
    description = "Entropy-aware on-policy distillation from a teacher model, on the student's own actions."
    row_source = "episodes"
    needs_teacher = True

    def loss(self, rows: "EpisodeRows") -> ChannelLoss:
        """Metrics: those of the kernel."""
        from stages.losses.eopd import EopdOptions, eopd_from_hidden, reverse_kl_from_log_probs

        settings = self.settings.eopd
        if rows.teacher_logps is not None:
            loss, totals = reverse_kl_from_log_probs(
                rows.student_logps(self.settings.temperature)[0],
                rows.sampled_logps[0],
                rows.teacher_logps[0],
                rows.own[0],
                num_tokens=rows.tokens,
            )
            return ChannelLoss(loss, rows.tokens, {name: Mean(*total) for name, total in totals.items()})
        loss, totals = eopd_from_hidden(
            rows.student,
            rows.teacher,
            rows.targets[0],
            rows.sampled_logps[0],
            rows.own[0],
            num_tokens=rows.tokens,
            top_k=settings.top_k,
            temperature=self.settings.temperature,
            options=EopdOptions(coef=settings.coefficient, entropy_threshold=settings.entropy_threshold),
        )
        counts = {"soft_kd_num_tokens": "soft_kd_avg_kl", "soft_kd_num_high_entropy": "high_entropy_avg_kl"}
        metrics = {name: Mean(*total) for name, total in totals.items()}
        return ChannelLoss(loss, rows.tokens, metrics | {name: Sum(totals[of][1]) for name, of in counts.items()})
