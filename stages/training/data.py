"""Preference pairs and sampled episodes as the channels' rows: in token ids, and with the student's scores.

A pair goes through this file from top to bottom: `tokenise` turns extracted pairs into token ids, `PairSource` deals
the pairs of each step and caches the reference's log-probs, and `PairRows` is what a channel's loss gets. Sampled
episodes follow in the same order: `own_episode`, `EpisodeRows`. Hinted turns are in hints.py.

Shapes: P pairs, N completion tokens of all rows, V vocabulary. Log-probs are natural, in nats.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from stages.backends.ranks import Ranks
from stages.errors import BadInput, UsageError
from stages.losses.tokens import Predictors
from stages.messages import opening_ids
from stages.rollouts.agent_loop import Episode
from stages.runs.kinds import Row
from stages.training.scoring import Scored, Tree, head, logits, score, token_log_probs

COLUMNS = ("pair_id", "messages_json", "prompt_token_ids", "chosen", "rejected")


@dataclass(eq=False)
class ScoredRows:
    """Rows of one source, a part of a step's or all of them, with the student's hidden states for them.

    Subclasses compute what any channel reads when they are made, and what only some channels read when the first of
    them asks. whole: all rows of the step, from which the denominators come. frozen: what is not trained and gives
    these rows their targets, None without one.
    """

    rows: Sequence[Any]
    whole: Sequence[Any]
    model: Any
    scored: Scored
    frozen: Any

    @property
    def student(self) -> Predictors:
        """Hidden states of all completion tokens, with gradient, and the head behind them."""
        return Predictors(self.scored.hidden, head(self.model))

    @cached_property
    def student_logits(self) -> Float[Tensor, "N V"]:
        """Logits of all completion tokens, with gradient."""
        # No channel here reads them: [N, V] in float32 is gigabytes at a vocabulary of 150,000. Prefer `student`, whose
        # kernels go through the vocabulary in chunks.
        return logits(self.model, self.scored)

    def student_logps(self, temperature: float) -> Float[Tensor, " N"]:
        """Return the log-probs (nats) of the completion tokens under the student, with gradient."""
        # Not cached: each channel asks at most once, and the autograd graph would live as long as the rows.
        return token_log_probs(self.model, self.scored, temperature)

    def tensor(self, values: Iterable[Any]) -> Tensor:
        """Return a tensor of numbers on the model's device."""
        return torch.tensor(list(values), device=self.scored.targets.device)


@dataclass(frozen=True)
class TokenPair:
    """One pair in token ids, end tokens included: the tree of its two completions, chosen first."""

    pair_id: str
    tree: Tree


def tokenise(rows: Iterable[Row], tokenizer: Any, max_tokens: int) -> tuple[list[TokenPair], Counter[str]]:
    """Return the pairs that still differ after tokenisation and truncation, and the number of dropped ones by reason.

    Reasons: `no_room` (the prompt alone fills max_tokens), `equal_after_tokenisation`, `equal_after_truncation`.
    `BadInput` names a missing column.
    """
    kept: list[TokenPair] = []
    dropped = Counter[str]()
    for row in rows:
        if missing := [name for name in COLUMNS if name not in row]:
            raise BadInput(
                f"A preference pair lacks the column {missing[0]!r}. "
                f"Pairs need {', '.join(COLUMNS)}; rerun extract-pairs."
            )
        prompt = row["prompt_token_ids"] or opening_ids(tokenizer, orjson.loads(row["messages_json"]))
        chosen, rejected = (
            [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for side in ("chosen", "rejected")
        )
        room = max_tokens - len(prompt)
        if room < 1:
            dropped["no_room"] += 1
        elif chosen == rejected:
            dropped["equal_after_tokenisation"] += 1
        elif chosen[:room] == rejected[:room]:
            dropped["equal_after_truncation"] += 1
        else:
            kept.append(TokenPair(row["pair_id"], Tree(prompt, (chosen[:room], rejected[:room]))))
    return kept, dropped


@dataclass(eq=False)
class PairSource:
    """Deals the pairs of each step: every pair once before any comes again, in an order given by the seed alone."""

    pairs: list[TokenPair]
    per_step: int
    seed: int
    _reference: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False)

    def batch(self, step: int) -> list[TokenPair]:
        """Return the pairs of a step: a pure function of the step, so that a resumed run continues where it stopped."""
        start, dealt = step * self.per_step, []
        for position in range(start, start + min(self.per_step, len(self.pairs))):
            epoch, offset = divmod(position, len(self.pairs))
            if epoch not in self._orders:  # a step touches two rounds at most, so older ones are let go
                self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
                self._orders[epoch] = list(range(len(self.pairs)))
                random.Random(f"{self.seed}/{epoch}").shuffle(self._orders[epoch])  # noqa: S311 (an order, no secret)
            dealt.append(self.pairs[self._orders[epoch][offset]])
        return dealt

    @torch.no_grad()
    def cache_reference(self, model: Any, chunk: int = 32, ranks: Ranks | None = None) -> None:
        """Sum the reference's log-probs of both sides of every pair, once; the reference is the model as it is now.

        Each of several processes does its share.
        """
        ranks = ranks or Ranks()
        own = self.pairs[ranks.rank :: ranks.count]
        for start in range(0, len(own), chunk):
            pairs = own[start : start + chunk]
            scored = score(model, [pair.tree for pair in pairs])
            sums = scored.per_branch(token_log_probs(model, scored)).view(-1, 2).tolist()
            self._reference |= {pair.pair_id: (c, r) for pair, (c, r) in zip(pairs, sums, strict=True)}
        for reference in ranks.gather(self._reference):
            self._reference |= reference

    def reference(self, pairs: Iterable[TokenPair], device: torch.device) -> Float[Tensor, "p 2"]:
        """Return cached log-prob sums in nats, [pairs, (chosen, rejected)]."""
        return torch.tensor([self._reference[pair.pair_id] for pair in pairs], device=device)


@dataclass(eq=False)
class PairRows(ScoredRows):
    """Preference pairs; the second axis of every table is (chosen, rejected). `frozen` holds the cached reference.

    sums: [P, 2] log-probs (nats) summed over each completion, with gradient. lengths: [P, 2] tokens of each completion.
    num_pairs, chosen_tokens: pairs, and tokens of the chosen completions, of the whole step.
    """

    frozen: PairSource | None

    def __post_init__(self) -> None:
        # Every channel on pairs starts from the sums, so they are computed once, whichever of the channels are on.
        self.sums = self.scored.per_branch(token_log_probs(self.model, self.scored)).view(-1, 2)
        self.lengths = self.scored.lengths.view(-1, 2)
        # A step may be cut into parts: the denominators are those of the whole step, so that the parts' losses add up.
        self.num_pairs = len(self.whole)
        self.chosen_tokens = sum(len(pair.tree.branches[0]) for pair in self.whole)

    @cached_property
    def reference(self) -> Float[Tensor, "P 2"]:
        """Log-prob sums (nats) under the model that training started from; `UsageError` without a pair source."""
        # Read by DPO alone: for SimPO and SFT nothing was cached, and a look-up would fail.
        if self.frozen is None:
            raise UsageError("A channel needs the reference's log-probs of the pairs, but there is no pair source.")
        return self.frozen.reference(self.rows, self.scored.hidden.device)


@dataclass(frozen=True)
class OwnEpisode:
    """A sampled episode as one tree: 1 for the tokens the policy wrote, and the log-probs of sampling them (nats).

    teacher_logprobs: of all tokens, under a teacher behind a server (nats); None where the teacher is in this process.
    """

    tree: Tree
    own: list[int]
    logprobs: list[float]
    teacher_logprobs: list[float] | None = None


def own_episode(episode: Episode) -> OwnEpisode | None:
    """Return an episode as one tree; None when nothing was sampled or the policy gave no token ids."""
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


@dataclass(eq=False)
class EpisodeRows(ScoredRows):
    """Whole sampled episodes; `frozen` is the teacher model. The tokens between the student's actions are masked.

    own: [N] 1 for the tokens that the student wrote. targets: [N] token ids. sampled_logps: [N] log-probs (nats) that
    the tokens were sampled with, 0 between actions. teacher_logps: [N] those of a teacher behind a server (nats), None
    without such a teacher. tokens: how many the student wrote in the whole step.
    """

    def __post_init__(self) -> None:
        # In the dtype of losses, float32 at least: bfloat16 counts up to 256 exactly and no further.
        own = self.tensor(x for episode in self.rows for x in episode.own)
        self.own = own.to(torch.promote_types(self.scored.hidden.dtype, torch.float32))
        self.targets = self.scored.targets
        self.sampled_logps = self.tensor(x for episode in self.rows for x in episode.logprobs)
        given = [episode.teacher_logprobs for episode in self.rows]
        served = all(logps is not None for logps in given)
        self.teacher_logps = self.tensor(x for logps in given for x in logps or ()) if served else None
        self.tokens = sum(sum(episode.own) for episode in self.whole)

    @cached_property
    def teacher(self) -> Predictors:
        """The teacher's hidden states for the same tokens, without gradient; `UsageError` when there is no teacher."""
        if self.frozen is None:
            raise UsageError("A channel distils from a teacher, but there is none. Set teacher.model.")
        with torch.no_grad():
            return Predictors(score(self.frozen, [e.tree for e in self.rows]).hidden, head(self.frozen))
