"""The rows of one optimiser step beside GRPO's groups, and of the parts that it is cut into."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from stages.errors import BadInput
from stages.rollouts.episode import Episode
from stages.training.groups import pack
from stages.training.pair_source import TokenPair
from stages.training.settings import RowSource
from stages.training.trees import Tree

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
    """A sampled episode as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats).

    teacher_logprobs: of all tokens, under a teacher behind a server (nats); None where the teacher is held here.
    """

    tree: Tree
    own: list[int]
    logprobs: list[float]
    teacher_logprobs: list[float] | None = None

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
        return ChannelBatch(self.pairs[index::count], self.hinted[index::count], self.episodes[index::count], self.step)

    def packed(self, max_tokens: int) -> "list[ChannelBatch]":
        """Parts of at most so many tokens, a row that is longer by itself."""
        sources = get_args(RowSource)
        rows = [(name, row) for name in sources for row in self.of(name)]
        return [
            ChannelBatch(
                whole=self.step, **{name: [rows[i][1] for i in part if rows[i][0] == name] for name in sources}
            )
            for part in pack([row.num_tokens for _, row in rows], max_tokens)
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
