"""History: how much of a conversation the policy is shown. What was said is recorded whole either way."""

import re

from stages.messages import Message

FULL = "full"
PATTERN = r"^(full|last [1-9][0-9]*)$"
"""`full`, or `last N`: of all observations the last N, of older ones a line in their place."""


def shown(messages: list[Message], history: str | None) -> list[Message]:
    """The conversation as the policy sees it. The opening and the assistant's own messages always stay."""
    found = re.match(r"last (\d+)$", history or FULL)
    if found is None:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    observed = [i for i in range(first, len(messages)) if messages[i]["role"] != "assistant"]
    old = set(observed[: -int(found[1])])
    return [_left_out(message) if i in old else message for i, message in enumerate(messages)]


def _left_out(message: Message) -> Message:
    return {**message, "content": f"[{len(message['content'])} characters left out]"}
