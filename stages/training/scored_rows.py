"""The rows of one step with the student's hidden states for them: what all channels of one row source share.

Each scored quantity is computed once, when the first channel asks for it. Shapes: P pairs, N tokens, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.errors import UsageError
from stages.losses.hidden import Predictors
from stages.losses.sdpo import SelfTaught, update_average
from stages.training.data import HintedTurn, PairSource
from stages.training.scoring import Scored, Tree, head, logits, score, token_log_probs
from stages.training.settings import Hints, RowSource

# ---- self_teacher
# The student as its own teacher behind a hint: as it is, its moving average, or held near where it started.
#
# What a teacher has of its own are the weights that training changes: all, or an adapter's. They are lent to the
# student
# while it is scored as a teacher, so that no second model exists.

FILE = "self_teacher.safetensors"
Weights = dict[str, Tensor]


class SelfTeacher:
    """Made before training; `begin` is told of the model that training starts from, with its adapter if it has one.

    Source: lasgroup/SDPO 0e6d510 verl/workers/actor/dp_actor.py:52-64 (trust region), 132-151 (moving average).
    """

    def __init__(self, hints: Hints | None = None) -> None:
        hints = hints or Hints()
        self._kind, self._rate = hints.teacher, hints.teacher_rate
        self._kept: Weights | None = None

    def begin(self, student: Any) -> None:
        """Copy the weights that training will change, unless a checkpoint gave them.

        With an adapter, a trust region needs none: where training starts is the model with its adapter off.
        """
        if self._kind == "current" or (self._kind == "trust-region" and _has_adapter(student)):
            return
        changing = _changing(student)
        if self._kept is None:
            self._kept = {name: weight.detach().clone() for name, weight in changing.items()}
        self._kept = {name: self._kept[name].to(weight.device) for name, weight in changing.items()}

    @torch.no_grad()
    def predictors(self, student: Any, trees: Sequence[Tree]) -> SelfTaught:
        """Of all completion tokens, without gradient."""
        if self._kind == "current":
            return SelfTaught(_scored(student, trees))
        if self._kind == "trust-region" and _has_adapter(student):
            with _resting(student), student.disable_adapter():
                kept = _scored(student, trees)
        else:
            if self._kept is None:
                self.begin(student)
            with _resting(student), _lent(student, self._kept or {}):
                kept = _scored(student, trees)
        if self._kind == "ema":
            return SelfTaught(kept)
        return SelfTaught(kept, _scored(student, trees), self._rate)

    def after_step(self, student: Any) -> None:
        """Let the moving average follow; a student with weights that are no numbers is not followed, as upstream."""
        if self._kept is None or self._kind != "ema":
            return
        changing = _changing(student)
        if all(bool(weight.isfinite().all()) for weight in changing.values()):
            update_average([self._kept[name] for name in changing], list(changing.values()), self._rate)

    def save(self, folder: Path) -> None:
        """Keep the copied weights in a checkpoint."""
        if self._kept is not None:
            save_file({name: weight.clone() for name, weight in self._kept.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        if (folder / FILE).exists():
            self._kept = load_file(folder / FILE)


def _has_adapter(student: Any) -> bool:
    return hasattr(student, "disable_adapter") and bool(getattr(student, "peft_config", None))


def _changing(student: Any) -> Weights:
    """The weights that are trained, by name, each once."""
    return {name: weight for name, weight in student.named_parameters() if weight.requires_grad}


def _scored(model: Any, trees: Sequence[Tree]) -> Predictors:
    return Predictors(score(model, trees).hidden, head(model))


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """A teacher drops nothing out."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextmanager
def _lent(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights in the place of its own, tied ones wherever they stand; its own are not touched."""
    own = dict(model.named_parameters())
    others = {id(own[name]): nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(weight) in others
    ]
    try:
        for module, name, weight in places:
            setattr(module, name, others[id(weight)])
        yield
    finally:
        for module, name, weight in places:
            setattr(module, name, weight)


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
