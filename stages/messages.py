"""Messages between environments and policies: tool calls in their text, and their rendering as token ids.

An assistant message is its reasoning, its content and its calls, in that order, each part only where there is one:

    <think>
    I should look the term up.
    </think>

    Let me search.
    <tool_call>
    {"name": "search_pages", "arguments": {"query": "Utsuro-bune"}}
    </tool_call>

Arguments that are the JSON text of an object are written verbatim, all others as a JSON string. Call ids are left
out: they are drawn at random, so they would make equal conversations different. The results of calls follow in the
order of the calls.

Token ids: the opening is rendered once, afterwards only what is new is rendered and appended. Ids that were sampled are
never rebuilt from text: rendering an answer again can tokenise it differently (stock Qwen3 templates drop an empty
think block, and one text has many BPE splits), and then prompts stop being prefixes of each other.
"""

import json
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from composer_stages import json_text
from composer_stages.errors import UsageError

Message = dict[str, str]
"""A chat message: {"role": "system" | "user" | "assistant", "content": text}."""

OMITTED = "[omitted: "
"""Where a picture or a sound was in a recorded message: `[omitted: image_url]`."""
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
THINK, THOUGHT = "<think>\n", "\n</think>"
NAME, ARGUMENTS = '{"name": ', ', "arguments": '
DECODER = json.JSONDecoder()
UNREADABLE = (ValueError, RecursionError)
"""What Python's reader of JSON raises for a text that is none, or one that is nested a thousand deep."""


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is text: the JSON of an object where the model wrote one, else the text that it wrote."""

    name: str
    arguments: str


@dataclass(frozen=True)
class MessageParts:
    """The parts of an assistant message. Reasoning that is empty counts as none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def write(parts: MessageParts) -> str:
    """Return the text of an assistant message."""
    thought = f"{THINK}{parts.reasoning}{THOUGHT}" if parts.reasoning else ""
    blocks = [parts.content] if parts.content else []
    for call in parts.calls:
        arguments = call.arguments if is_object(call.arguments) else json.dumps(call.arguments, ensure_ascii=False)
        blocks.append(f"{OPEN}{NAME}{json.dumps(call.name, ensure_ascii=False)}{ARGUMENTS}{arguments}}}{CLOSE}")
    body = "\n".join(blocks)
    return f"{thought}\n\n{body}" if thought and body else thought or body


def is_object(text: str) -> bool:
    """Return whether a text is the JSON of an object and nothing else, which is not nested too deeply to be used."""
    try:
        if not text.startswith("{"):
            return False
        json_text.require_shallow(text)  # others walk the object, and write it again
        return DECODER.raw_decode(text)[1] == len(text)
    except UNREADABLE:
        return False


def read(text: str) -> MessageParts:
    """Parse a text into its parts; `write` gives the same text back. A text that `write` never gives is all content."""
    reasoning, body = None, text
    if text.startswith(THINK) and THOUGHT in text:
        thought, _, behind = text[len(THINK) :].partition(THOUGHT)
        if thought:
            reasoning, body = thought, behind.removeprefix("\n\n")
    # Content may hold the mark of a call, so the first place where calls reach to the end counts. What does not give
    # the same text again, such as arguments spelled otherwise, stays content: a record must not change the answer.
    start = body.find(OPEN)
    while start >= 0:
        calls = _calls(body, start)
        if calls and (start == 0 or body[start - 1] == "\n"):
            parts = MessageParts(body[: max(start - 1, 0)], calls, reasoning)
            if write(parts) == text:
                return parts
        start = body.find(OPEN, start + 1)
    parts = MessageParts(body, (), reasoning)
    return parts if write(parts) == text else MessageParts(text)


def _calls(text: str, start: int) -> tuple[ToolCall, ...]:
    """Parse the tool calls from an index to the end of a text; return none if other text follows."""
    calls: list[ToolCall] = []
    while text.startswith(OPEN, start):
        call_and_end = _call(text, start + len(OPEN))
        if call_and_end is None:
            return ()
        call, end = call_and_end
        calls.append(call)
        if end == len(text):
            return tuple(calls)
        start = end + 1 if text[end] == "\n" else len(text)
    return ()


def _call(text: str, start: int) -> tuple[ToolCall, int] | None:
    """Parse one call whose JSON begins at an index; return the call and the end of its block."""
    try:
        if not text.startswith(NAME, start):
            return None
        name, at = DECODER.raw_decode(text, start + len(NAME))
        if not text.startswith(ARGUMENTS, at):
            return None
        begin = at + len(ARGUMENTS)
        arguments, at = DECODER.raw_decode(text, begin)
    except UNREADABLE:
        return None
    if not text.startswith("}" + CLOSE, at) or not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else text[begin:at]), at + 1 + len(CLOSE)


def number_calls(conversation: Iterable[Message], numbers: Iterator[int]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: calls apart from the content with numbered ids, which results repeat."""
    waiting: list[str] = []
    converted: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] == "assistant":
            parts = read(message["content"])
            waiting = [f"call_{next(numbers)}" for _ in parts.calls]
            calls = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(waiting, parts.calls, strict=True)
            ]
            thought = {} if parts.reasoning is None else {"reasoning_content": parts.reasoning}
            called = {"tool_calls": calls} if calls else {}
            converted.append({"role": "assistant", "content": parts.content, **thought, **called})
        elif message["role"] == "tool":
            converted.append({**message, "tool_call_id": waiting.pop(0) if waiting else f"call_{next(numbers)}"})
        else:
            converted.append(dict(message))
    return converted


def pin_settings(tokenizer: Any, settings: Mapping[str, bool | int | float | str]) -> None:
    """Fix these settings in a tokenizer's chat template, so that every later rendering uses them.

    The settings are `set` statements before the template: a saved tokenizer renders alike elsewhere, and the template's
    digest covers them.
    """
    lines = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in sorted(settings.items()))
    if not tokenizer.chat_template.startswith(lines):
        tokenizer.chat_template = lines + tokenizer.chat_template


SENTINEL = "\u2063ANSWER\u2063"


class TooManyTokens(Exception):
    """A text was not tokenised, because it has at least `least` tokens, more than the limit."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least:,} tokens")
        self.least = least


def opening_ids(
    tokenizer: Any, messages: list[Message], tools: Sequence[Mapping[str, Any]] = (), most: float = math.inf
) -> list[int]:
    """Return token ids of a conversation up to where the assistant's answer begins; `tokenizer` has a chat template.

    With tools, in OpenAI's form, these are declared as the template does it, and calls are rendered from their parts.
    `TooManyTokens` where it must have more than `most`, as its characters show.
    """
    rendered: list[Any] = list(messages)
    if tools:
        rendered = number_calls(messages, count())
        for call in (call for message in rendered for call in message.get("tool_calls", ())):
            if is_object(call["function"]["arguments"]):  # what templates write out, and do not take apart
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        rendered, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return _ids(tokenizer, text, most)


def following_ids(tokenizer: Any, new: list[Message], most: float = math.inf) -> list[int]:
    """Return the token ids that the template puts after the end token of an answer, up to the next answer.

    `new` are the messages in between. The ids are found by rendering them behind a marked answer and keeping what
    follows the mark and its end token, which works for any template that keeps earlier text. `UsageError` for a
    template that does not end an answer with the tokenizer's end token, `TooManyTokens` as of `opening_ids`.
    """
    conversation = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}, *new]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    _, mark, suffix = text.rpartition(SENTINEL)
    end = tokenizer.eos_token
    if not mark or not suffix.lstrip("\n").startswith(end):
        raise UsageError("template-without-end-token", name_or_path=tokenizer.name_or_path, end=end)
    return _ids(tokenizer, suffix.lstrip("\n").removeprefix(end), most)


def _ids(tokenizer: Any, text: str, most: float) -> list[int]:
    # To tokenise 50 MB takes gigabytes; to count its characters takes nothing.
    if len(text) > most and (least := least_tokens(tokenizer, text)) > most:
        raise TooManyTokens(least)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


_LONGEST: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def least_tokens(tokenizer: Any, text: str) -> int:
    """Return a number of tokens that a text has at least, by its characters and the longest token of the vocabulary.

    White space does not count: special tokens may take in any amount of it. 0 for tokenizers that drop characters, or
    make one token of any number of them: only byte-pair encodings without normaliser, or with NFC, are known not to.
    """
    if tokenizer not in _LONGEST:
        _LONGEST[tokenizer] = _longest_token(tokenizer)
    longest = _LONGEST[tokenizer]
    return -(-(len(text) - sum(map(text.count, string.whitespace))) // longest) if longest else 0


def _longest_token(tokenizer: Any) -> int:
    """Return the largest number of characters that one token represents; 0 if there is no bound."""
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel

    core, vocabulary = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
    if core is None or not isinstance(core.model, BPE) or not isinstance(core.normalizer, NFC | None):
        return 0
    covers_bytes = core.model.byte_fallback or {*ByteLevel.alphabet()} <= vocabulary.keys()
    if not covers_bytes and (core.model.unk_token is None or core.model.fuse_unk):
        return 0
    return max(map(len, vocabulary)) * (1 if core.normalizer is None else 4)  # NFC makes one character of four at most
