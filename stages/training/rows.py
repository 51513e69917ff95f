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
from stages.rollouts.episode import Episode
from stages.training.pair_source import PairSource, TokenPair
from stages.training.settings import RowSource
from stages.training.trees import Scored, Tree, logits, score, token_log_probs

GROUP_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")


@dataclass(frozen=True)
class HintedTurn:
    """One faulty turn in token ids: the action as sampled, behind the prompt without (`tree`) and with the hint."""

    tree: Tree
    hinted: Tree


@dataclass(frozen=True)
class OwnEpisode:
    """A sampled episode as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats)."""

    tree: Tree
    own: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class ChannelBatch:
    """The rows of all channels in one step, a field each source; a source without rows has an empty list."""

    pairs: Sequence[TokenPair] = field(default_factory=list)
    hinted: Sequence[HintedTurn] = field(default_factory=list)
    episodes: Sequence[OwnEpisode] = field(default_factory=list)

    def of(self, row_source: RowSource) -> Sequence[Any]:
        """The rows of one source."""
        rows: Sequence[Any] = getattr(self, row_source)
        return rows

    def part(self, index: int, count: int) -> "ChannelBatch":
        """The share of one of `count` micro-batches."""
        return ChannelBatch(self.pairs[index::count], self.hinted[index::count], self.episodes[index::count])


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
    if "pairs" in needed and not batch.pairs:
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


class _ScoredRows:
    """A step's rows of one source with the student's hidden states for them."""

    def __init__(self, rows: Sequence[Any], model: Any, scored: Scored, step: int, frozen: Frozen) -> None:
        self._rows, self._model, self._scored, self._frozen = rows, model, scored, frozen
        self.step = step
        self.training: bool = model.training

    @cached_property
    def student_logits(self) -> Float[Tensor, "1 N V"]:
        """Of all completion tokens, with gradient."""
        return logits(self._model, self._scored)[None]


class PairRows(_ScoredRows):
    """Preference pairs; the second axis of every table is (chosen, rejected)."""

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
        """N, the tokens of all turns."""
        return len(self._scored.targets)

    @property
    def mean_weights(self) -> Float[Tensor, "1 N"]:
        """1/N for every token, float32: a sum under these weights is a mean."""
        return torch.full((1, self.tokens), 1.0 / self.tokens, device=self._scored.targets.device)

    @cached_property
    def teacher_logits(self) -> Float[Tensor, "1 N V"]:
        """Of the same tokens behind the hint, without gradient."""
        with torch.no_grad():
            return logits(self._model, score(self._model, [turn.hinted for turn in self.turns]))[None]


class EpisodeRows(_ScoredRows):
    """Whole sampled episodes with a teacher model; the tokens between the student's actions are masked."""

    @cached_property
    def own(self) -> Float[Tensor, "1 N"]:
        """1 for the tokens that the student wrote."""
        return torch.tensor([x for e in self._rows for x in e.own], device=self._scored.targets.device)[None].float()

    @cached_property
    def tokens(self) -> int:
        """Tokens that the student wrote."""
        return int(self.own.sum())

    @property
    def targets(self) -> Int[Tensor, "1 N"]:
        """Token ids."""
        return self._scored.targets[None]

    @cached_property
    def sampled_logps(self) -> Float[Tensor, "1 N"]:
        """Log-probs (nats) that the tokens were sampled with, 0 between actions."""
        return torch.tensor([x for e in self._rows for x in e.logprobs], device=self._scored.targets.device)[None]

    @cached_property
    def teacher_logits(self) -> Float[Tensor, "1 N V"]:
        """Of the same tokens, without gradient; `UsageError` when there is no teacher."""
        teacher = self._frozen.teacher
        if teacher is None:
            raise UsageError("A channel distils from a teacher, but there is none. Set teacher.model.")
        with torch.no_grad():
            return logits(teacher, score(teacher, [episode.tree for episode in self._rows]))[None]


SCORED_ROWS: dict[RowSource, type[PairRows] | type[HintedRows] | type[EpisodeRows]] = {
    "pairs": PairRows,
    "hinted": HintedRows,
    "episodes": EpisodeRows,
}
