"""History: how much of a conversation the policy is shown. What was said is recorded whole either way."""

import re

from stages.messages import Message

FULL, SUMMARISE = "full", "summarise"
PATTERN = r"^(full|last [1-9][0-9]*|summarise)$"
"""`full`; `last N`: of all observations the last N, of older ones a line in their place; `summarise`: since the last
summary, which the policy is asked for when the limit of an episode's context nears."""
REQUEST = (
    "This conversation will soon be longer than you can read. Summarise it for yourself: what the task asks for, what "
    "you did and found out, which files you changed, and what is left to do. Everything but the task will be replaced "
    "by your summary. Answer with the summary alone, and run nothing."
)
GO_ON = "What was said before your summary is left out from here on. Go on with the task."
NEAR = 0.75
"""A summary is asked for once that takes this share of the limit: one exchange may take the rest."""


def shown(messages: list[Message], history: str | None) -> list[Message]:
    """The conversation as the policy sees it. The opening always stays, and what the assistant said since."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if history == SUMMARISE:
        return _since_summary(messages, first)
    found = re.match(r"last (\d+)$", history or FULL)
    if found is None:
        return messages
    observed = [i for i in range(first, len(messages)) if messages[i]["role"] != "assistant"]
    old = set(observed[: -int(found[1])])
    return [_left_out(message) if i in old else message for i, message in enumerate(messages)]


def request() -> Message:
    """What asks for a summary."""
    return {"role": "user", "content": REQUEST}


def _since_summary(messages: list[Message], first: int) -> list[Message]:
    """The opening, the last summary and what came since; a request for one is the end of what stands before it.

    One message, because templates of some models want user and assistant to take turns.
    """
    *_, asked = [-1, *(i for i in range(first, len(messages) - 1) if messages[i] == request())]
    kept = messages if asked < 0 else [*messages[:first], *messages[asked + 1 :]]
    if kept[-1] == request() and kept[-2]["role"] == "user":
        return [*kept[:-2], {"role": "user", "content": f"{kept[-2]['content']}\n\n{REQUEST}"}]
    return kept


def _left_out(message: Message) -> Message:
    return {**message, "content": f"[{len(message['content'])} characters left out]"}
