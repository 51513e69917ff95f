"""Between conversations and token ids: what every policy shares that samples token by token."""

from typing import Any

from transformers import AutoTokenizer

from stages.errors import BadInput
from stages.messages import following_ids, opening_ids, pin_settings
from stages.policy import dialect, embedded
from stages.policy.base import Sample, Turn
from stages.policy.config import PolicyConfig
from stages.policy.tool_formats import canonical
from stages.runs import store


def load_tokenizer(source: str, config: PolicyConfig, revision: str | None = None) -> Any:
    """The tokenizer of a folder or hub id, its chat template's settings pinned.

    `BadInput` where there is no such model, and where its tokenizer has no template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise not_loaded(config, error) from None
    if tokenizer.chat_template is None:
        raise BadInput(
            f"The tokenizer of {config.model!r} has no chat template, so messages cannot be rendered. "
            "Use an instruction-tuned model."
        )
    pin_settings(tokenizer, config.chat_template_kwargs)
    return tokenizer


def not_loaded(config: PolicyConfig, error: Exception) -> BadInput:
    """The sentence for what transformers says of a model that it cannot load."""
    first = str(error).strip().splitlines()[0]
    return BadInput(
        f"The model {config.model!r} cannot be loaded ({first}). "
        f"Give a Hugging Face folder, a reachable hub id, or {embedded.EXAMPLE}."
    )


def prompt_ids(tokenizer: Any, turn: Turn) -> list[int]:
    """The ids of a question: rendered once, then what was sampled with only what is new rendered behind it."""
    if turn.held_ids is None:
        return opening_ids(tokenizer, turn.messages, dialect.declared(turn.tools))
    last = max(i for i, message in enumerate(turn.messages) if message["role"] == "assistant")
    return turn.held_ids + following_ids(tokenizer, turn.messages[last + 1 :])


def end_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    declared = generation_config.eos_token_id
    more = declared if isinstance(declared, list) else [declared]
    return {i for i in (*more, tokenizer.eos_token_id) if i is not None}


def token_sample(
    tokenizer: Any, ends: set[int], prompt: list[int], ids: list[int], tool_calls: str, **more: Any
) -> Sample:
    """The answer that these ids are, its calls read as `tool_calls` says; `more` are further fields of the `Sample`."""
    ended = bool(ids) and ids[-1] in ends
    return Sample(
        text=canonical(tool_calls, tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)),
        finish_reason="stop" if ended else "length",
        prompt_ids=prompt,
        completion_ids=ids,
        prompt_tokens=len(prompt),
        completion_tokens=len(ids),
        **more,
    )


def tokenizer_facts(config: PolicyConfig, tokenizer: Any) -> dict[str, Any]:
    """What the manifest keeps of any model whose tokens we render: its name, and digests of tokenizer and template."""
    return {
        "model": config.model,
        "tokenizer_sha256": store.digest(sorted(tokenizer.get_vocab().items())),
        "chat_template_sha256": store.digest(tokenizer.chat_template),
    }
