"""How much of a rollout's conversation the policy is shown: all of it, the last observations, or a summary."""

import re

from composer_stages.data_files import load_toml
from composer_stages.messages import Message

FULL, SUMMARISE = "full", "summarise"
HISTORY_PATTERN = r"^(full|last [1-9][0-9]*|summarise)$"
"""`full`; `last N`: the last N observations, a line in place of each older one; `summarise`: everything since the last
summary, which the policy is asked for near the context limit of the rollout."""
PROMPTS = load_toml(__package__, "prompts.toml")
SUMMARY_PROMPT: str = PROMPTS["summary"]
SUMMARY_REQUEST: Message = {"role": "user", "content": SUMMARY_PROMPT}


def visible_messages(messages: list[Message], history: str | None) -> list[Message]:
    """Return the conversation as the policy sees it. The opening and all later assistant messages always remain."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if history == SUMMARISE:
        # A request at the very end is still unanswered and leaves nothing out.
        *_, request = [-1, *(i for i in range(first, len(messages) - 1) if messages[i] == SUMMARY_REQUEST)]
        messages_since = messages if request < 0 else [*messages[:first], *messages[request + 1 :]]
        if messages_since[-1] == SUMMARY_REQUEST and messages_since[-2]["role"] == "user":
            # One message, because chat templates of some models require user and assistant to alternate.
            return [
                *messages_since[:-2],
                {"role": "user", "content": f"{messages_since[-2]['content']}\n\n{SUMMARY_PROMPT}"},
            ]
        return messages_since
    match = re.match(r"last (\d+)$", history or FULL)
    if match is None:
        return messages
    observations = [i for i in range(first, len(messages)) if messages[i]["role"] != "assistant"]
    old = set(observations[: -int(match[1])])
    return [
        {**message, "content": f"[{len(message['content'])} characters left out]"} if i in old else message
        for i, message in enumerate(messages)
    ]
