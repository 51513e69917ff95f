"""The student's own rollouts as rows, and the channels that distil a teacher model on them: TAID and EOPD.

`own_rollout` makes a rollout one tree of token ids, `RolloutSource` gives all of a step, `RolloutRows` is what a
channel's loss gets.

Shapes: N completion tokens of all rows. Log-probs are natural, in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.errors import UsageError
from composer_stages.losses.distillation import EopdOptions, TaidSchedule, advance, eopd, taid
from composer_stages.losses.tokens import Predictors
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import LocalPolicy, load_model
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs.run import RunWriter
from composer_stages.training.channels.base import (
    Channel,
    ChannelLoss,
    Metric,
    RowSource,
    ScoredRows,
    SourceInputs,
    State,
)
from composer_stages.training.config import Config
from composer_stages.training.scoring import Tree, predictors, score

if TYPE_CHECKING:
    from composer_stages.training.distributed import Student


@dataclass(frozen=True)
class OwnRollout:
    """A sampled rollout as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats)."""

    tree: Tree
    mask: list[int]
    logprobs: list[float]


def own_rollout(rollout: LiveRollout) -> OwnRollout | None:
    """Return a rollout as one tree; None when nothing was sampled or the policy gave no token ids."""
    if not rollout.steps or rollout.steps[0].sample.prompt_ids is None:
        return None
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    prompt = rollout.steps[0].sample.prompt_ids
    for step in rollout.steps:
        between = (step.sample.prompt_ids or [])[len(prompt) + len(ids) :]
        completion = step.sample.completion_ids or []
        ids += between + completion
        mask += [0] * len(between) + [1] * len(completion)
        logprobs += [0.0] * len(between) + (step.sample.logprobs or [])
    return OwnRollout(Tree(prompt, (ids,)), mask, logprobs)


@dataclass(eq=False)
class RolloutRows(ScoredRows):
    """Whole sampled rollouts; `source` has the teacher model. The tokens between the student's actions are masked.

    own: [N] 1 for the tokens that the student wrote. targets: [N] token ids. sampled_logps: [N] log-probs (nats) that
    the tokens were sampled with, 0 between actions. tokens: how many the student wrote in the whole step.
    """

    def __post_init__(self) -> None:
        # In the dtype of losses, float32 at least: bfloat16 counts up to 256 exactly and no further.
        mask = self.tensor(x for rollout in self.rows for x in rollout.mask)
        self.own = mask.to(torch.promote_types(self.scored.hidden.dtype, torch.float32))
        self.targets = self.scored.targets
        self.sampled_logps = self.tensor(x for rollout in self.rows for x in rollout.logprobs)
        self.tokens = sum(sum(rollout.mask) for rollout in self.step_rows)

    @cached_property
    def teacher(self) -> Predictors:
        """The teacher's hidden states for the same tokens, without gradient; `UsageError` when there is no teacher."""
        teacher = self.source.teacher
        if teacher is None:
            raise UsageError("training.channels.no-teacher-model")
        with torch.no_grad():
            return predictors(teacher, score(teacher, [e.tree for e in self.rows]))


@dataclass(eq=False)
class RolloutSource(RowSource[OwnRollout]):
    """Gives all rollouts of a step that have token ids. teacher: a model that scores them; None where there is none."""

    teacher: Any = None

    name, scored_rows, whole_rollouts = "rollouts", RolloutRows, True

    @classmethod
    def open(cls, inputs: SourceInputs) -> Self:
        """Return the source with its teacher; `UsageError` if the vocabulary differs."""
        teacher = inputs.config.teacher
        return cls(teacher and open_teacher(teacher, "teacher", inputs.student, inputs.out).model)

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[OwnRollout]:
        """Return the rollouts of a step in token ids."""
        del step
        # A rollout that failed before its first action has no token ids, so no channel can learn from it.
        return [x for x in map(own_rollout, rollouts) if x is not None]


def open_teacher(config: PolicyConfig, role: str, student: "Student", out: RunWriter) -> LocalPolicy:
    """Return a teacher in this process, which is never trained, and record it; `UsageError` if the vocabulary differs.

    role: its name among the models of the run. A model that teaches in several ways is loaded once.
    """
    if config.loaded not in student.frozen:
        model, tokenizer = load_model(config, listener=out.progress)
        check_vocabulary(student.policy.tokenizer, tokenizer, config.model)
        student.frozen[config.loaded] = model.eval().requires_grad_(False), tokenizer
    teacher = LocalPolicy(*student.frozen[config.loaded], config)
    out.model(role, **teacher.facts())
    return teacher


def check_vocabulary(student: Any, teacher: Any, name: str) -> None:
    """Raise `UsageError` unless both tokenizers have the same tokens under the same ids; a head may be padded."""
    # By id and token, not by size: heads are padded to multiples, and equal sizes prove nothing.
    student_tokens, teacher_tokens = (
        {i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (student, teacher)
    )
    differing = sorted(
        i for i in student_tokens.keys() | teacher_tokens.keys() if student_tokens.get(i) != teacher_tokens.get(i)
    )
    if differing:
        first = differing[0]
        raise UsageError(
            "training.channels.teacher-vocabulary-differs",
            name=name,
            token_id=first,
            teacher_token=teacher_tokens.get(first),
            student_token=student_tokens.get(first),
            differing=len(differing),
        )


class Taid(Channel[RolloutRows]):
    """TAID: mean over the student's own tokens. Kernel, schedule and source: stages/losses/distillation.py.

    The schedule is the channel's state; it moves once a step of training, where upstream moves it once a micro-batch.
    """

    source = RolloutSource

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._schedule = TaidSchedule(**config.taid.model_dump())
        self._state = self._schedule.start()

    def loss(self, rows: RolloutRows) -> ChannelLoss:
        """Return the loss; the metric t is the position of the target between student (0) and teacher (1)."""
        t = float(self._state.t)  # constant within a step: `end_step` alone moves it, so that parts add up
        total = taid(rows.student, rows.teacher, rows.own, t)
        return ChannelLoss(total / rows.tokens, rows.tokens, {"t": Metric("max", t)})

    def end_step(self, loss: Float[Tensor, ""], step: int) -> None:
        """Move the schedule by the loss of the step."""
        # The schedule is on the host, where its comparisons wait for nothing.
        self._state, _ = advance(self._schedule, self._state, loss.cpu(), step, self.config.optimisation.steps)

    def state(self) -> State:
        """Return the schedule's state as JSON; None is the infinite loss before the first step, which JSON lacks."""
        values = {name: float(getattr(self._state, name)) for name in ("t", "prev_loss", "momentum")}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def load(self, state: State) -> None:
        """Continue the schedule from `state`, as the last complete step left it."""
        values = {name: torch.tensor(math.inf if value is None else value) for name, value in state.items()}
        self._state = replace(self._state, **values)


class Eopd(Channel[RolloutRows]):
    """EOPD: mean over the student's own tokens, log-probs at sampling temperature.

    Kernel: stages/losses/distillation.py.
    """

    source = RolloutSource

    def loss(self, rows: RolloutRows) -> ChannelLoss:
        """Return the loss; metrics are means in nats or shares of tokens, named as upstream without "actor/".

        Of all own tokens: rev_kl, avg_teacher_advantage, avg_teacher_log_prob, avg_student_log_prob, ppo_kl,
        pg_clipfrac, pg_clipfrac_lower, soft_kd_loss, soft_kd_token_ratio and soft_kd_high_entropy_ratio; and over the
        tokens of high teacher entropy or with a forward KL, soft_kd_avg_high_entropy, high_entropy_avg_kl,
        soft_kd_avg_kl, and how many there were (soft_kd_num_*).
        """
        settings = self.config.eopd
        loss, totals = eopd(
            rows.student,
            rows.teacher,
            rows.targets,
            rows.sampled_logps,
            rows.own,
            num_tokens=rows.tokens,
            top_k=settings.top_k,
            temperature=self.temperature,
            options=EopdOptions(coef=settings.coefficient, entropy_threshold=settings.entropy_threshold),
        )
        # Upstream logs these numbers of tokens too; each is the denominator of a mean that is already here.
        counts = {"soft_kd_num_tokens": "soft_kd_avg_kl", "soft_kd_num_high_entropy": "high_entropy_avg_kl"}
        metrics = {name: Metric("mean", *total) for name, total in totals.items()}
        metrics |= {name: Metric("sum", totals[mean][1]) for name, mean in counts.items()}
        return ChannelLoss(loss, rows.tokens, metrics)
