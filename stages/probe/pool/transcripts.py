"""Conversations and texts to token rows, always by joining ids: a text cut in two tokenises differently at the seam.

A prompt is a list of messages, or a string that is already rendered. An answer is a list of messages that begins with
the assistant's (what the environment said in between is not the policy's own), or a string. Every assistant message
ends with the end token, on both sides of a pair alike.
"""

from typing import Any, TypeAlias

from stages.errors import BadInput
from stages.messages import Message, following_ids, opening_ids
from stages.probe.pool.tokens import TokenRow
from stages.rollouts.episode import Episode

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
