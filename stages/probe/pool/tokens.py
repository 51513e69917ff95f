"""Token rows and their batches: the prompt, what followed it, and which of those tokens the policy itself wrote.

Rows are built from ids, never from joined text, and padded on the right, so that with a causal mask pads change
nothing.

Shapes: B rows, T tokens (prompt and completion, padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from stages.errors import BadInput
from stages.messages import Message, following_ids, opening_ids
from stages.rollouts.agent_loop import Episode
from stages.runs.records import Row


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
        """The row cut after `count` completion tokens."""
        return TokenRow(self.prompt_ids, self.completion_ids[:count], self.own[:count])


def as_tokens(row: Row) -> TokenRow:
    """The tokens of a pool row."""
    return TokenRow(row["prompt_ids"], row["completion_ids"], row["own"])


@dataclass(frozen=True)
class Batch:
    """Padded rows; `own` marks the tokens whose log-probs count, at their own positions."""

    ids: Int[Tensor, "B T"]
    attention: Int[Tensor, "B T"]
    own: Bool[Tensor, "B T"]

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device."""
        return Batch(self.ids.to(device), self.attention.to(device), self.own.to(device))

    def __len__(self) -> int:
        return len(self.ids)


def collate(rows: Sequence[TokenRow], pad_id: int = 0, extra_pads: int = 0) -> Batch:
    """Pad rows on the right to the longest one, and by `extra_pads` more."""
    width = max(map(len, rows)) + extra_pads
    ids = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    own = [[False] * len(row.prompt_ids) + list(row.own) for row in rows]
    return Batch(
        torch.tensor([line + [pad_id] * (width - len(line)) for line in ids]),
        torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in ids]),
        torch.tensor([line + [False] * (width - len(line)) for line in own]),
    )


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, each of at most `max_tokens` padded tokens (but at least one row)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ---- transcripts
# Conversations and texts to token rows, always by joining ids: a text cut in two tokenises differently at the seam.
#
# A prompt is a list of messages, or a string that is already rendered. An answer is a list of messages that begins
# with
# the assistant's (what the environment said in between is not the policy's own), or a string. Every assistant message
# ends with the end token, on both sides of a pair alike.

Prompt: TypeAlias = str | list[Message]
Answer: TypeAlias = str | list[Message]


def token_row(tokenizer: Any, prompt: Prompt, answer: Answer) -> TokenRow:
    """The ids that a policy would have seen and written; `BadInput` when an answer's ends are not the assistant's."""
    prompt_ids = _plain(tokenizer, prompt) if isinstance(prompt, str) else opening_ids(tokenizer, prompt)
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    ids: list[int] = []
    own: list[bool] = []
    for part, is_own in _parts(tokenizer, messages):
        ids += part
        own += [is_own] * len(part)
    return TokenRow(prompt_ids, ids, own)


def _parts(tokenizer: Any, messages: list[Message]) -> list[tuple[list[int], bool]]:
    """Runs of ids: each assistant message with its end token, and what the template puts between two of them."""
    parts: list[tuple[list[int], bool]] = []
    between: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if between:
            parts.append((following_ids(tokenizer, between), False))
            between = []
        parts.append(([*_plain(tokenizer, message["content"]), tokenizer.eos_token_id], True))
    if between or not parts or not parts[0][1]:
        raise BadInput("An answer begins and ends with a message of the assistant's.")
    return parts


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def episode_row(episode: Episode) -> tuple[TokenRow, list[float | None]]:
    """An episode that a local model played, as it was sampled, and the log-prob in nats of each completion token.

    The log-prob is None where the token is not the policy's own.
    """
    first = episode.steps[0].sample
    ids: list[int] = []
    logps: list[float | None] = []
    start = len(first.prompt_ids or [])
    for step in episode.steps:
        prompt, completion = step.sample.prompt_ids or [], step.sample.completion_ids or []
        observed = prompt[start + len(ids) :]
        ids += [*observed, *completion]
        logps += [*[None] * len(observed), *(step.sample.logprobs or [])]
    return TokenRow(first.prompt_ids or [], ids, [logp is not None for logp in logps]), logps
