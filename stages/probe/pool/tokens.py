"""Token rows and their batches: the prompt, the completion, and which of its tokens the policy itself wrote.

Texts, conversations, episodes and recorded rollouts become rows by joining ids, never text: a text cut in two tokenises
differently at the seam. Rows are padded on the right, so that with a causal mask pads change nothing.

Shapes: B rows, T tokens (prompt and completion, padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stages.errors import BadInput
from stages.messages import Message, following_ids, opening_ids
from stages.runs.kinds import Row


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
        """Number of completion tokens that the policy wrote."""
        return sum(self.own)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def first(self, count: int) -> "TokenRow":
        """Cut the row after `count` completion tokens."""
        return TokenRow(self.prompt_ids, self.completion_ids[:count], self.own[:count])


def as_tokens(row: Row) -> TokenRow:
    """Return the tokens of a pool row."""
    return TokenRow(row["prompt_ids"], row["completion_ids"], row["own"])


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


def token_row(tokenizer: Any, prompt: str | list[Message], answer: str | list[Message]) -> TokenRow:
    """Build the ids that a policy would have seen and written.

    A prompt is a list of messages, or a string that is already rendered. An answer is a list of messages that begins
    with the assistant's, or a string; messages of the environment in between are not the policy's own. Every assistant
    message ends with the end token, on both sides of a pair alike. `BadInput` when an answer does not begin and end
    with an assistant message.
    """
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise BadInput("An answer begins and ends with a message of the assistant's.")
    ids: list[int] = []
    own: list[bool] = []
    between: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if between:
            observed = following_ids(tokenizer, between)
            ids += observed
            own += [False] * len(observed)
            between = []
        written = [*tokenizer(message["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids += written
        own += [True] * len(written)
    if isinstance(prompt, str):
        # A rendered prompt holds its special tokens as text, so the tokenizer must add none.
        return TokenRow(tokenizer(prompt, add_special_tokens=False)["input_ids"], ids, own)
    return TokenRow(opening_ids(tokenizer, prompt), ids, own)


def rendered_row(tokenizer: Any, states: list[list[Message]], steps: list[Row]) -> TokenRow:
    """Render a recorded rollout's text with `tokenizer`; `states` are the conversations before each of its steps."""
    start = len(states[0])
    answer = [*states[-1][start:], {"role": "assistant", "content": steps[-1]["action"]}]
    return token_row(tokenizer, states[0], answer)


def sampled_row(
    turns: Sequence[tuple[Sequence[int] | None, Sequence[int], Sequence[float] | None]],
) -> tuple[TokenRow, list[float | None]] | None:
    """Join the turns of a rollout as they were sampled: (prompt ids, completion ids, log-probs in nats) of each.

    Also returns each completion token's log-prob, None where the token is not the policy's own. Returns None where
    prompt ids or log-probs of a turn were not stored. Every turn's prompt must begin with the ids of the turns before.
    """
    ids: list[int] = []
    logps: list[float | None] = []
    first = turns[0][0]
    for prompt, completion, sampled in turns:
        if first is None or prompt is None or sampled is None:
            return None
        # What a prompt has more than the ids so far is what the environment answered.
        observed = prompt[len(first) + len(ids) :]
        ids += [*observed, *completion]
        logps += [*[None] * len(observed), *sampled]
    return TokenRow(first or (), ids, [logp is not None for logp in logps]), logps
