"""The rows of one optimiser step beside GRPO's groups, and what all channels of one row source share.

Each scored quantity is computed once, when the first channel asks for it. Shapes: P pairs, N tokens, V vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.errors import BadInput, UsageError
from stages.losses.hidden import Predictors
from stages.rollouts.episode import Episode
from stages.training.groups import pack
from stages.training.pair_source import PairSource, TokenPair
from stages.training.self_teacher import SelfTeacher
from stages.training.settings import RowSource
from stages.training.trees import Scored, Tree, head, logits, score, token_log_probs

GROUP_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")


@dataclass(frozen=True)
class HintedTurn:
    """One faulty turn in token ids: the action as sampled, behind the prompt without (`tree`) and with the hint.

    own: 1 for the tokens that count, None where all do. logprobs: of sampling them (nats), where the policy gave any.
    """

    tree: Tree
    hinted: Tree
    own: list[int] | None = None
    logprobs: list[float] | None = None

    @property
    def mask(self) -> list[int]:
        """1 for the tokens that count."""
        return [1] * len(self.tree.branches[0]) if self.own is None else self.own

    @property
    def num_tokens(self) -> int:
        """Of the student's row and the teacher's."""
        return self.tree.num_tokens + self.hinted.num_tokens


@dataclass(frozen=True)
class OwnEpisode:
    """A sampled episode as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats)."""

    tree: Tree
    own: list[int]
    logprobs: list[float]

    @property
    def num_tokens(self) -> int:
        """Of the whole row."""
        return self.tree.num_tokens


@dataclass(frozen=True)
class ChannelBatch:
    """The rows of all channels in one step, or in a part of it; a source without rows has an empty list."""

    pairs: Sequence[TokenPair] = field(default_factory=list)
    hinted: Sequence[HintedTurn] = field(default_factory=list)
    episodes: Sequence[OwnEpisode] = field(default_factory=list)
    whole: "ChannelBatch | None" = None
    """The step that this is a part of; None where it is the whole step."""

    def of(self, row_source: RowSource) -> Sequence[Any]:
        """The rows of one source."""
        rows: Sequence[Any] = getattr(self, row_source)
        return rows

    @property
    def step(self) -> "ChannelBatch":
        """All rows of the step, from which the denominators come."""
        return self.whole or self

    def part(self, index: int, count: int) -> "ChannelBatch":
        """The share of one of `count` micro-batches; it may be empty."""
        return ChannelBatch(
            self.pairs[index::count], self.hinted[index::count], self.episodes[index::count], self.step
        )


    def packed(self, max_tokens: int) -> "list[ChannelBatch]":
        """Parts of at most so many tokens, a row that is longer by itself."""
        rows: list[tuple[RowSource, Any]] = [(name, row) for name in SCORED_ROWS for row in self.of(name)]
        parts = pack([row.num_tokens for _, row in rows], max_tokens)
        return [
            ChannelBatch(
                whole=self.step, **{name: [rows[i][1] for i in part if rows[i][0] == name] for name in SCORED_ROWS}
            )
            for part in parts
        ]


def collate(groups: Mapping[str, Any], batch: ChannelBatch, needed: Collection[RowSource]) -> dict[str, Any]:
    """The batch of a step: TRL's group tensors plus `channels`.

    `BadInput` names a column that is missing or of the wrong length, and missing pairs.
    needed: the row sources that active channels use.
    """
    if missing := [name for name in GROUP_COLUMNS if name not in groups]:
        raise BadInput(
            f"The batch lacks the column {missing[0]!r}, which GRPO needs; it has {', '.join(sorted(groups))}."
        )
    rows = {name: len(groups[name]) for name in GROUP_COLUMNS[:5]}
    if len(set(rows.values())) > 1:
        odd = next(name for name, count in rows.items() if count != rows["prompt_ids"])
        raise BadInput(f"The column {odd!r} has {rows[odd]} rows, but prompt_ids has {rows['prompt_ids']}.")
    if "pairs" in needed and not batch.step.pairs:
        raise BadInput(
            "A preference channel has a weight, but the batch holds no pairs. "
            "Give pairs with --from, or set its weight to 0."
        )
    return {**groups, "channels": batch}


def own_episode(episode: Episode) -> OwnEpisode | None:
    """An episode as one tree; None when nothing was sampled or the policy gave no token ids."""
    if not episode.steps or episode.steps[0].sample.prompt_ids is None:
        return None
    ids: list[int] = []
    own: list[int] = []
    logprobs: list[float] = []
    prompt = episode.steps[0].sample.prompt_ids
    for step in episode.steps:
        between = (step.sample.prompt_ids or [])[len(prompt) + len(ids) :]
        completion = step.sample.completion_ids or []
        ids += between + completion
        own += [0] * len(between) + [1] * len(completion)
        logprobs += [0.0] * len(between) + (step.sample.logprobs or [])
    return OwnEpisode(Tree(prompt, (ids,)), own, logprobs)


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
    def mean_weights(self) -> Float[Tensor, "1 N"]:
        """1 / tokens for every token that counts: a sum under these weights is this part's share of the step's mean."""
        mask = torch.tensor([x for turn in self.turns for x in turn.mask], device=self._scored.targets.device)[None]
        return mask * (1.0 / self.tokens)

    @property
    def sampled_logps(self) -> Float[Tensor, "1 N"]:
        """Log-probs (nats) that the tokens were sampled with; `UsageError` where the policy gave none."""
        if any(turn.logprobs is None for turn in self.turns):
            raise UsageError(
                "hints.importance_clip needs the log-probs of sampling, and the policy gave none for a hinted turn. "
                "Leave importance_clip out."
            )
        return torch.tensor([x for t in self.turns for x in t.logprobs or ()], device=self._scored.targets.device)[None]

    def student_logps(self, temperature: float) -> Float[Tensor, "1 N"]:
        """Log-probs (nats) of the tokens under the student, without gradient."""
        with torch.no_grad():
            return token_log_probs(self._model, self._scored, temperature)[None]

    @cached_property
    def teacher_logits(self) -> Float[Tensor, "1 N V"]:
        """Of the same tokens behind the hint, without gradient."""
        return self._frozen.itself.logits(self._model, [turn.hinted for turn in self.turns])[None]


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

    @property
    def student(self) -> Predictors:
        """Hidden states of all tokens, with gradient, and the head behind them."""
        return Predictors(self._scored.hidden, head(self._model))

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
