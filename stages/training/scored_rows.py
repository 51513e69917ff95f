"""The rows of one step with the student's hidden states for them: what all channels of one row source share.

Each scored quantity is computed once, when the first channel asks for it. Shapes: P pairs, N tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.errors import UsageError
from stages.losses.hidden import Predictors
from stages.losses.sdpo_hidden import SelfTaught
from stages.training.pair_source import PairSource
from stages.training.rows import HintedTurn
from stages.training.self_teacher import SelfTeacher
from stages.training.settings import RowSource
from stages.training.trees import Scored, head, logits, score, token_log_probs


@dataclass(frozen=True)
class Frozen:
    """The models that are not trained: a teacher, and the reference behind the pairs' cached log-probs."""

    teacher: Any | None = None
    pairs: PairSource | None = None
    itself: SelfTeacher = field(default_factory=SelfTeacher)
    """The student as its own teacher behind a hint."""


class _ScoredRows:
    """Rows of one source, a part of a step's or all of them, with the student's hidden states for them."""

    def __init__(
        self, rows: Sequence[Any], whole: Sequence[Any], model: Any, scored: Scored, step: int, frozen: Frozen
    ) -> None:
        self._rows, self._whole, self._model, self._scored, self._frozen = rows, whole, model, scored, frozen
        self.step = step
        self.training: bool = model.training

    @property
    def student(self) -> Predictors:
        """Hidden states of all completion tokens, with gradient, and the head behind them."""
        return Predictors(self._scored.hidden, head(self._model))

    @cached_property
    def student_logits(self) -> Float[Tensor, "1 N V"]:
        """Of all completion tokens, with gradient."""
        return logits(self._model, self._scored)[None]


class PairRows(_ScoredRows):
    """Preference pairs; the second axis of every table is (chosen, rejected)."""

    @property
    def num_pairs(self) -> int:
        """Pairs of the whole step."""
        return len(self._whole)

    @property
    def chosen_tokens(self) -> int:
        """Tokens of the chosen completions of the whole step."""
        return sum(len(pair.tree.branches[0]) for pair in self._whole)

    @cached_property
    def sums(self) -> Float[Tensor, "P 2"]:
        """Log-probs (nats) summed over each completion, with gradient."""
        return self._scored.per_branch(token_log_probs(self._model, self._scored)).view(-1, 2)

    @cached_property
    def lengths(self) -> Int[Tensor, "P 2"]:
        """Tokens of each completion."""
        return self._scored.lengths.view(-1, 2)

    @cached_property
    def reference(self) -> Float[Tensor, "P 2"]:
        """Log-prob sums (nats) under the model that training started from; `UsageError` without a pair source."""
        if self._frozen.pairs is None:
            raise UsageError("A channel needs the reference's log-probs of the pairs, but there is no pair source.")
        return self._frozen.pairs.reference(list(self._rows), self._scored.hidden.device)


class HintedRows(_ScoredRows):
    """Faulty turns; the model itself, behind the prompt with the hint, is the teacher."""

    @property
    def turns(self) -> Sequence[HintedTurn]:
        """The rows."""
        return self._rows

    @property
    def tokens(self) -> int:
        """Tokens of all turns of the whole step."""
        return sum(sum(turn.mask) for turn in self._whole)

    @property
    def mean_weights(self) -> Float[Tensor, " N"]:
        """1 / tokens for every token that counts: a sum under these weights is this part's share of the step's mean."""
        mask = torch.tensor([x for turn in self.turns for x in turn.mask], device=self._scored.targets.device)
        return mask * (1.0 / self.tokens)

    @property
    def sampled_logps(self) -> Float[Tensor, " N"]:
        """Log-probs (nats) that the tokens were sampled with; `UsageError` where the policy gave none."""
        if any(turn.logprobs is None for turn in self.turns):
            raise UsageError(
                "hints.importance_clip needs the log-probs of sampling, and the policy gave none for a hinted turn. "
                "Leave importance_clip out."
            )
        return torch.tensor([x for t in self.turns for x in t.logprobs or ()], device=self._scored.targets.device)

    def student_logps(self, temperature: float) -> Float[Tensor, " N"]:
        """Log-probs (nats) of the tokens under the student, without gradient."""
        with torch.no_grad():
            return token_log_probs(self._model, self._scored, temperature)

    @cached_property
    def taught(self) -> SelfTaught:
        """What predicts the same tokens behind the hint, without gradient."""
        return self._frozen.itself.predictors(self._model, [turn.hinted for turn in self.turns])


class EpisodeRows(_ScoredRows):
    """Whole sampled episodes with a teacher model; the tokens between the student's actions are masked."""

    @cached_property
    def own(self) -> Float[Tensor, "1 N"]:
        """1 for the tokens that the student wrote, in the dtype of losses."""
        own = torch.tensor([x for e in self._rows for x in e.own], device=self._scored.targets.device)[None]
        return own.to(torch.promote_types(self._scored.hidden.dtype, torch.float32))

    @property
    def tokens(self) -> int:
        """Tokens that the student wrote in the whole step."""
        return sum(sum(episode.own) for episode in self._whole)

    @property
    def targets(self) -> Int[Tensor, "1 N"]:
        """Token ids."""
        return self._scored.targets[None]

    @cached_property
    def sampled_logps(self) -> Float[Tensor, "1 N"]:
        """Log-probs (nats) that the tokens were sampled with, 0 between actions."""
        return torch.tensor([x for e in self._rows for x in e.logprobs], device=self._scored.targets.device)[None]

    def student_logps(self, temperature: float) -> Float[Tensor, "1 N"]:
        """Log-probs (nats) of the tokens under the student, with gradient."""
        return token_log_probs(self._model, self._scored, temperature)[None]

    @cached_property
    def teacher_logps(self) -> "Float[Tensor, '1 N'] | None":
        """Log-probs (nats) of the tokens as a teacher behind a server told them; None without such a one."""
        told = [episode.teacher_logprobs for episode in self._rows]
        if any(logps is None for logps in told):
            return None
        return torch.tensor([x for logps in told for x in logps], device=self._scored.targets.device)[None]

    @cached_property
    def teacher(self) -> Predictors:
        """The teacher's for the same tokens, without gradient; `UsageError` when there is no teacher."""
        teacher = self._frozen.teacher
        if teacher is None:
            raise UsageError("A channel distils from a teacher, but there is none. Set teacher.model.")
        with torch.no_grad():
            return Predictors(score(teacher, [episode.tree for episode in self._rows]).hidden, head(teacher))


SCORED_ROWS: dict[RowSource, type[PairRows] | type[HintedRows] | type[EpisodeRows]] = {
    "pairs": PairRows,
    "hinted": HintedRows,
    "episodes": EpisodeRows,
}
