"""Rows of token ids: the prompt, the completion, and which of its tokens the policy itself wrote; padded batches.

Rows are padded on the right, so that with a causal mask pads change nothing.

Shapes: B rows, T tokens (prompt and completion, padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stages.errors import BadInput


@dataclass(frozen=True)
class TokenRow:
    """One sequence. `own` marks the completion tokens that the policy wrote: all but observations between its turns.

    `BadInput` when the prompt is empty, a completion token has no mark, or no token is the policy's own.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    own: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.own) != len(self.completion_ids) or not any(self.own) or not self.prompt_ids:
            raise BadInput(
                f"A row has {len(self.prompt_ids)} prompt tokens, {len(self.completion_ids)} completion tokens and "
                f"{sum(self.own)} of its own among them; it needs a prompt, a mark for every completion token, and an "
                "own token."
            )

    @property
    def num_own(self) -> int:
        """Return the number of completion tokens that the policy wrote."""
        return sum(self.own)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def first(self, count: int) -> "TokenRow":
        """Cut the row after `count` completion tokens."""
        return TokenRow(self.prompt_ids, self.completion_ids[:count], self.own[:count])


@dataclass(frozen=True)
class TokenBatch:
    """Padded rows; `own` marks the tokens whose log-probs count, at their own positions."""

    ids: Int[Tensor, "B T"]
    attention: Int[Tensor, "B T"]
    own: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Copy the batch to a device."""
        return TokenBatch(self.ids.to(device), self.attention.to(device), self.own.to(device))

    def __len__(self) -> int:
        return len(self.ids)


def collate(rows: Sequence[TokenRow], pad_id: int = 0, extra_pads: int = 0) -> TokenBatch:
    """Pad rows on the right to the longest one, and by `extra_pads` more."""
    # The pad id does not matter: pads are masked, and no own token is one.
    width = max(map(len, rows)) + extra_pads
    ids = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    own = [[False] * len(row.prompt_ids) + list(row.own) for row in rows]
    return TokenBatch(
        torch.tensor([line + [pad_id] * (width - len(line)) for line in ids]),
        torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in ids]),
        torch.tensor([line + [False] * (width - len(line)) for line in own]),
    )


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices into batches of similar length, each of at most `max_tokens` padded tokens, at least one row."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # In order of length a row is the longest of its batch so far, which decides the batch's padded tokens.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
