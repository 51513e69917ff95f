"""Preference pairs as rows, and the channels on them: DPO, SimPO and SFT.

`tokenise` turns extracted pairs into token ids, `PairSource` deals the pairs of each step and caches the reference's
log-probs, `PairRows` is what a channel's loss gets.

Shapes: P pairs, N completion tokens of all rows. Log-probs are natural, in nats.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, Self

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from composer_stages.backends.ranks import Ranks
from composer_stages.errors import BadInput, UsageError
from composer_stages.losses.preference import PairLogProbs, dpo_losses, simpo_loss
from composer_stages.messages import answer_ids, opening_ids
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs.kinds import Row
from composer_stages.training.channels.base import Channel, ChannelLoss, Metric, RowSource, ScoredRows, SourceInputs
from composer_stages.training.scoring import Tree, score, token_log_probs

COLUMNS = ("pair_id", "messages_json", "prompt_token_ids", "chosen", "rejected")


MEASURED = 200
"""Pairs whose lengths are measured before a training, spread over all of them."""


@dataclass(frozen=True)
class TokenPair:
    """One pair in token ids, end tokens included: the tree of its two completions, chosen first."""

    pair_id: str
    tree: Tree


def tokenise(rows: Iterable[Row], tokenizer: Any, max_tokens: int) -> tuple[list[TokenPair], dict[str, list[str]]]:
    """Return a run's pairs in token ids as `fitted` does; `BadInput` names a missing column."""
    return fitted((_token_sides(row, tokenizer) for row in rows), max_tokens)


def _token_sides(row: Row, tokenizer: Any) -> TokenPair:
    """Return a pair in token ids, each side as the template ends it."""
    if missing := [name for name in COLUMNS if name not in row]:
        raise BadInput("training.channels.pair-lacks-column", column=missing[0], columns=COLUMNS)
    messages, tools = (orjson.loads(row.get(name) or "[]") for name in ("messages_json", "tools_json"))
    declared = declare_tools(tools)
    prompt = row["prompt_token_ids"] or opening_ids(tokenizer, messages, declared)
    answers = [answer_ids(tokenizer, messages, row[side], declared) for side in ("chosen", "rejected")]
    end = len(prompt) - max(replaced for _, replaced in answers)
    chosen, rejected = (prompt[end : len(prompt) - replaced] + ids for ids, replaced in answers)
    return TokenPair(row["pair_id"], Tree(prompt[:end], (chosen, rejected)))


def measure_pairs(rows: Iterable[Row], number: int, tokenizer: Any, max_tokens: int) -> tuple[float, int]:
    """Return the tokens of a pair with its state, in the mean and at most, of `MEASURED` of this number of rows."""
    pairs, _ = tokenise(islice(rows, 0, None, max(number // MEASURED, 1)), tokenizer, max_tokens)
    lengths = [len(pair.tree.prompt) + sum(map(len, pair.tree.branches)) for pair in pairs]
    return (sum(lengths) / len(lengths), max(lengths)) if lengths else (0.0, 0)


def fitted(pairs: Iterable[TokenPair], max_tokens: int) -> tuple[list[TokenPair], dict[str, list[str]]]:
    """Return the pairs cut to `max_tokens` that still differ, and the ids of those that are not kept whole, by reason.

    Reasons: `cut`, and of dropped ones `no_room` (the prompt alone fills max_tokens), `equal_after_tokenisation`,
    `equal_after_truncation`.
    """
    token_pairs, lost = list[TokenPair](), dict[str, list[str]]()
    for pair in pairs:
        chosen, rejected = pair.tree.branches
        room = max_tokens - len(pair.tree.prompt)
        reason = (
            ("no_room" if room < 1 else "")
            or ("equal_after_tokenisation" if chosen == rejected else "")
            or ("equal_after_truncation" if chosen[:room] == rejected[:room] else "")
            or ("cut" if room < max(len(chosen), len(rejected)) else "")
        )
        if reason:
            lost.setdefault(reason, []).append(pair.pair_id)
        if reason in ("", "cut"):
            token_pairs.append(replace(pair, tree=replace(pair.tree, branches=(chosen[:room], rejected[:room]))))
    return token_pairs, lost


@dataclass(eq=False)
class PairRows(ScoredRows):
    """Preference pairs; the second axis of every table is (chosen, rejected). `source` has the reference.

    sums: [P, 2] log-probs (nats) summed over each completion, with gradient. lengths: [P, 2] tokens of each completion.
    num_pairs, chosen_tokens: pairs, and tokens of the chosen completions, of the whole step.
    """

    source: "PairSource"

    def __post_init__(self) -> None:
        # Every channel on pairs starts from the sums, so they are computed once, whichever of the channels are on.
        self.sums = self.scored.per_branch(token_log_probs(self.model, self.scored)).view(-1, 2)
        self.lengths = self.scored.lengths.view(-1, 2)
        # A step may be cut into parts: the denominators are those of the whole step, so that the parts' losses add up.
        self.num_pairs = len(self.step_rows)
        self.chosen_tokens = sum(len(pair.tree.branches[0]) for pair in self.step_rows)

    @cached_property
    def reference(self) -> Float[Tensor, "P 2"]:
        """Log-prob sums (nats) under the model that training started from."""
        # Read by DPO alone: for SimPO and SFT nothing was cached, and a look-up would fail.
        return self.source.reference(self.rows, self.scored.hidden.device)


@dataclass(eq=False)
class PairSource(RowSource[TokenPair]):
    """Deals the pairs of each step: every pair once before any comes again, in an order given by the seed alone."""

    name, scored_rows = "pairs", PairRows

    pairs: list[TokenPair]
    per_step: int
    seed: int
    _reference: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    _orders: dict[int, list[int]] = field(default_factory=dict, init=False)

    @classmethod
    def open(cls, inputs: SourceInputs) -> Self:
        """Return the pairs of the runs in token ids; counts what is kept and dropped. `UsageError` for none."""
        runs, settings, student = inputs.inputs["pairs"], inputs.config.pairs, inputs.student
        rows = chain.from_iterable(map(pairs_with_states, runs))
        token_pairs, lost = tokenise(rows, student.policy.tokenizer, settings.max_tokens)
        # Runs of one collection share pairs, and each would count twice.
        distinct = [*{pair.pair_id: pair for pair in token_pairs}.values()]
        cut = {"pairs_cut": len(lost.pop("cut"))} if "cut" in lost else {}
        dropped = {f"pairs_dropped_{reason}": len(ids) for reason, ids in lost.items()}
        if repeated := len(token_pairs) - len(distinct):
            dropped["pairs_dropped_duplicate"] = repeated
        inputs.out.count(pairs=len(distinct), **cut, **dropped)
        if not distinct:
            reasons = ", ".join(f"{len(ids)} {reason}" for reason, ids in lost.items())
            raise UsageError("training.channels.no-pairs-left", run=runs[0].path, lost=reasons)
        source = cls(distinct, settings.per_step, inputs.config.seed)
        if inputs.config.channels_that_need("reference"):
            # The reference is the model that training starts from.
            student.score(lambda: source.cache_reference(student.policy.model, ranks=student.ranks))
        return source

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[TokenPair]:
        """Return the pairs of a step: a pure function of the step, so that a resumed run continues where it stopped."""
        del rollouts
        start, dealt = step * self.per_step, []
        for position in range(start, start + min(self.per_step, len(self.pairs))):
            epoch, offset = divmod(position, len(self.pairs))
            if epoch not in self._orders:  # a step touches two rounds at most, so older ones are let go
                self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
                self._orders[epoch] = list(range(len(self.pairs)))
                random.Random(f"{self.seed}/{epoch}").shuffle(self._orders[epoch])  # noqa: S311 (an order, no secret)
            dealt.append(self.pairs[self._orders[epoch][offset]])
        return dealt

    @torch.no_grad()
    def cache_reference(self, model: Any, chunk: int = 32, ranks: Ranks | None = None) -> None:
        """Sum the reference's log-probs of both sides of every pair, once; the reference is the model as it is now.

        Each of several processes does its share, and gets the sums of all.
        """
        ranks = ranks or Ranks()
        process_pairs = self.pairs[ranks.rank :: ranks.count]
        for start in range(0, len(process_pairs), chunk):
            pairs = process_pairs[start : start + chunk]
            scored = score(model, [pair.tree for pair in pairs])
            sums = scored.per_branch(token_log_probs(model, scored)).view(-1, 2).tolist()
            self._reference |= {pair.pair_id: (c, r) for pair, (c, r) in zip(pairs, sums, strict=True)}
        for reference in ranks.gather(self._reference):
            self._reference |= reference

    def reference(self, pairs: Iterable[TokenPair], device: torch.device) -> Float[Tensor, "p 2"]:
        """Return cached log-prob sums in nats, [pairs, (chosen, rejected)]."""
        return torch.tensor([self._reference[pair.pair_id] for pair in pairs], device=device)


class Dpo(Channel[PairRows]):
    """DPO in the form `pairs.loss_type`: mean over pairs. Kernel and source: stages/losses/preference.py."""

    source = PairSource

    def loss(self, rows: PairRows) -> ChannelLoss:
        """Return the loss; metrics are the means over pairs of TRL's reward margin, accuracy and log-prob sums.

        margin: beta * ((chosen - reference) - (rejected - reference)) in nats. accuracy: share of margins above 0.
        chosen_logps, rejected_logps: log-probs summed over a completion, in nats.
        """
        settings, sums, reference, lengths = self.config.pairs, rows.sums, rows.reference, rows.lengths  # [P, 2]
        # Sums, not means over tokens: DPO's implicit reward is the log-ratio of whole completions. The lengths serve
        # the forms that divide by them (ipo, sigmoid_norm).
        terms = PairLogProbs(sums[:, 0], sums[:, 1], reference[:, 0], reference[:, 1], lengths[:, 0], lengths[:, 1])
        losses = dpo_losses(terms, settings.loss_type, settings.beta)
        margins = settings.beta * ((sums - reference)[:, 0] - (sums - reference)[:, 1]).detach()
        totals = {"margin": margins.sum(), "accuracy": (margins > 0).float().sum()}
        totals["chosen_logps"], totals["rejected_logps"] = sums.detach().sum(0)
        metrics = {name: Metric("mean", total, len(losses)) for name, total in totals.items()}
        return ChannelLoss(losses.sum() / rows.num_pairs, rows.num_pairs, metrics)


class Simpo(Channel[PairRows]):
    """SimPO: mean over pairs. Kernel and source: stages/losses/preference.py."""

    source = PairSource

    def loss(self, rows: PairRows) -> ChannelLoss:
        """Return the loss; the metric accuracy is the share of pairs whose chosen side has the higher mean log-prob."""
        settings, means = self.config.pairs, rows.sums / rows.lengths  # [P, 2]
        losses = simpo_loss(
            means[:, 0], means[:, 1], beta=settings.simpo_beta, gamma_beta_ratio=settings.simpo_gamma_ratio
        )
        right = (means[:, 0] > means[:, 1]).float().sum()
        metrics = {"accuracy": Metric("mean", right, len(means))}
        return ChannelLoss(losses.sum() / rows.num_pairs, rows.num_pairs, metrics)


class Sft(Channel[PairRows]):
    """Cross-entropy: minus the mean log-prob (nats) over all tokens of the chosen completions."""

    source = PairSource

    def loss(self, rows: PairRows) -> ChannelLoss:
        """Return the loss, without metrics."""
        # The rejected sides were scored as well: the rows of a source are scored once for all channels that read them.
        return ChannelLoss(-rows.sums[:, 0].sum() / rows.chosen_tokens, rows.chosen_tokens, {})
