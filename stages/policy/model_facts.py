"""What a model's tokenizer, chat template and configuration say, read once when the model is opened.

`ModelFacts` renders the prompts of turns and reads sampled token ids, for a model in this process and for one behind a
vLLM server alike.
"""

import math
from typing import Any

from composer_stages import messages
from composer_stages.messages import TooManyTokens, following_ids, opening_ids
from composer_stages.policy import base
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.policy.tool_calls import declare_tools, normalise_calls
from composer_stages.runs import store
from composer_stages.words import Sentence


def prompt_ids(tokenizer: Any, turn: Turn, most: float = math.inf) -> list[int]:
    """Return a turn's prompt ids: the sampled ids so far, with only the new messages rendered.

    `TooManyTokens` where the new messages must have more than `most`.
    """
    if turn.held_ids is None:
        return opening_ids(tokenizer, turn.messages, declare_tools(turn.tools), most)
    last = max(i for i, message in enumerate(turn.messages) if message["role"] == "assistant")
    return turn.held_ids + following_ids(
        tokenizer,
        turn.messages[last + 1 :],
        most,
        answer=turn.messages[last]["content"],
        last_id=turn.held_ids[-1],
        tools=declare_tools(turn.tools),
    )


class ModelFacts:
    """A model's tokenizer with its chat template, the ids that end and pad answers, and the context in tokens.

    end_ids: those of the generation config, the tokenizer's own, and that of the chat template. pad_id: the padding
    token, else the end token, else the first; padded positions are masked in any case. context: tokens that prompt and
    answer may have together; infinite where the model states no number.
    """

    def __init__(self, config: PolicyConfig, tokenizer: Any, generation_config: Any, context: float) -> None:
        self.config, self.tokenizer, self.context = config, tokenizer, context
        declared, end_id = generation_config.eos_token_id, tokenizer.eos_token_id
        ids = declared if isinstance(declared, list) else [declared]
        self.end_ids: set[int] = {i for i in (*ids, end_id, messages.end_id(tokenizer)) if i is not None}
        self.pad_id: int = next(i for i in (tokenizer.pad_token_id, end_id, 0) if i is not None)

    def render(self, turn: Turn | list[int]) -> list[int] | Sample:
        """Return prompt ids; the failed sample where they leave no room for an answer in the context."""
        try:
            ids = turn if isinstance(turn, list) else prompt_ids(self.tokenizer, turn, self.context)
        except TooManyTokens as error:
            number = str(error)
        else:
            if len(ids) < self.context:
                return ids
            number = f"{len(ids):,} tokens"
        return Sample(
            error_type="context", error=Sentence("policy.prompt-beyond-context", number=number, context=self.context)
        )

    def count_tokens(self, turn: Turn) -> int:
        """Return the tokens of a turn's prompt; of one that exceeds the context a lower bound."""
        try:
            return len(prompt_ids(self.tokenizer, turn, self.context))
        except TooManyTokens as error:
            return error.least

    def read(self, prompt: list[int], ids: list[int], **fields: Any) -> Sample:
        """Return the sample of these completion ids, its tool calls read in the format of `policy.tool_calls`."""
        ended = bool(ids) and ids[-1] in self.end_ids
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return Sample(
            text=normalise_calls(self.config.tool_calls, text),
            finish_reason="stop" if ended else "length",
            prompt_ids=prompt,
            completion_ids=ids,
            prompt_tokens=len(prompt),
            completion_tokens=len(ids),
            **fields,
        )

    def manifest(self) -> dict[str, Any]:
        """Return the manifest's entry: name, origin, digests of tokenizer and chat template."""
        return {
            "model": self.config.model,
            **(maker.facts(self.config.source) if (maker := base.real_models(self.config.source)) else {}),
            "tokenizer_sha256": store.digest(sorted(self.tokenizer.get_vocab().items())),
            "chat_template_sha256": store.digest(self.tokenizer.chat_template),
            # Earlier answers are kept as they were sampled: what another program renders differs where this is true.
            "template_rewrites_answers": messages.turn_form(self.tokenizer).rewrites,
        }
