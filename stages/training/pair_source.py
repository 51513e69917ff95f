"""Preference pairs as token ids: tokenised once, useless ones dropped and counted, the reference scored once."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
import torch
from jaxtyping import Float
from torch import Tensor

from stages.backends.ranks import Ranks
from stages.errors import BadInput
from stages.messages import opening_ids
from stages.runs.records import Row
from stages.training.trees import Tree, score, token_log_probs

COLUMNS = ("pair_id", "messages_json", "prompt_token_ids", "chosen", "rejected")


@dataclass(frozen=True)
class TokenPair:
    """One pair in token ids, end tokens included: the tree of its two completions, chosen first."""

    pair_id: str
    tree: Tree

    @property
    def num_tokens(self) -> int:
        """Of both rows."""
        return self.tree.num_tokens


def tokenise(rows: Iterable[Row], tokenizer: Any, max_tokens: int) -> tuple[list[TokenPair], Counter[str]]:
    """Pairs that still say something after tokenisation and truncation, and how many do not, by reason.

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
        chosen, rejected = _ids(tokenizer, row["chosen"]), _ids(tokenizer, row["rejected"])
        room = max_tokens - len(prompt)
        reason = _useless(chosen, rejected, room)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(TokenPair(row["pair_id"], Tree(prompt, (chosen[:room], rejected[:room]))))
    return kept, dropped


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _useless(chosen: list[int], rejected: list[int], room: int) -> str | None:
    if room < 1:
        return "no_room"
    if chosen == rejected:
        return "equal_after_tokenisation"
    return "equal_after_truncation" if chosen[:room] == rejected[:room] else None


class PairSource:
    """Deals the pairs of each step: every pair once before any comes again, in an order given by the seed alone."""

    def __init__(self, pairs: list[TokenPair], *, per_step: int, seed: int) -> None:
        self.pairs, self._per_step, self._seed = pairs, per_step, seed
        self._reference: dict[str, tuple[float, float]] = {}
        self._orders: dict[int, list[int]] = {}

    def batch(self, step: int) -> list[TokenPair]:
        """The pairs of a step: a pure function of the step, so that a resumed run continues where it stopped."""
        start = step * self._per_step
        return [self._at(position) for position in range(start, start + min(self._per_step, len(self.pairs)))]

    def _at(self, position: int) -> TokenPair:
        epoch, offset = divmod(position, len(self.pairs))
        if epoch not in self._orders:  # a step touches two rounds at most, so older ones are let go
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = self._order(epoch)
        return self.pairs[self._orders[epoch][offset]]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.pairs)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 (an order that repeats, not a secret)
        return order

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

    def reference(self, pairs: list[TokenPair], device: torch.device) -> Float[Tensor, "p 2"]:
        """Cached log-prob sums in nats, [pairs, (chosen, rejected)]."""
        return torch.tensor([self._reference[pair.pair_id] for pair in pairs], device=device)
