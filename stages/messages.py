"""Messages between environments and policies: thoughts and tool calls in their text, their rendering as token ids.

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
import re
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


# A thought is no action and no answer. The marks are those of the reasoning parsers of vLLM 0.11 and of the chat
# templates of TRL 1.16; what a template opens, the text of an answer only closes.

TAG = r"(?:\w{1,16}[:|])?(?:\w{1,16}_)?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)(?:_\w{1,16})?"
THOUGHTS = (
    (rf"<{TAG}>", rf"</{TAG}>", True),
    (r"\[THINK\]", r"\[/THINK\]", True),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>", True),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>", True),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>", True),
    ("◁think▷", "◁/think▷", True),
    (r"<\|channel>thought\b", r"<channel\|>", True),  # Gemma 4
    (r"<unused94>thought\b", "<unused95>", True),  # MedGemma
    (r"(?:<\|start\|>assistant)? ?to=self<\|message\|>", r"<\|e(?:om|ot)\|>", False),
    (r"(?:<\|start\|>assistant)?<\|channel\|>analysis[^<=]*<\|message\|>", r"<\|(?:end|return)\|>", False),
    # The template has opened GPT-OSS's analysis: its end comes before the first channel.
    (r"\A(?=(?:(?!<\|channel\|>).)*<\|end\|><\|start\|>assistant<\|channel\|>)", r"<\|end\|>", False),
    (r"<\|think\|>", r"<\|end\|>", False),  # Solar
    (r"\AHere(?:'s| is) my thought process:", r"Here(?:'s| is) my response:", False),  # Granite
)
"""The begin and end marks of a thought, and whether the end may stand alone, where the template opened the thought."""
DATA = (
    r"^[ \t]*```[^`\n]*\n(?:(?![ \t]*```)[^\n]*\n)*[ \t]*```[ \t]*$",
    r"<(?P<call>tool_call|function=[^>\n]*)>(?:(?!</?(?:tool_call|function)\b).)*</(?:tool_call|function)>",
)
"""Complete blocks of code and calls: marks in them are what the answer says about marks."""
MARK = re.compile(
    "|".join(
        (
            *DATA,
            f"(?P<line>^[ \t]*)?(?:{'|'.join(f'(?P<open{n}>{begin})' for n, (begin, _, _) in enumerate(THOUGHTS))})",
            f"(?P<close>{'|'.join(end for _, end, alone in THOUGHTS if alone)})",
        )
    ),
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
WORDS = ("think", "thought", "reasoning", "reflection", "scratchpad", "<|", "|>", "<unused95>")
"""One of which every mark holds."""
ENDS = [re.compile(end, re.IGNORECASE) for _, end, _ in THOUGHTS]
FRAME = re.compile(
    r"(?:<\|(?:end|eom)\|>)?(?:<\|(?:start|begin)\|>assistant)?(?:<\|channel\|>(?:final|commentary)\s*<\|message\|>"
    r"|<\|content\|>| ?to=user<\|message\|>|<\|START_(?:RESPONSE|TEXT)\|>|<\|begin_of_solution\|>)"
)
FRAME_END = re.compile(r"<\|(?:end|return|eom|eot|END_(?:RESPONSE|TEXT)|end_of_solution)\|>\s*\Z")
"""What families write around the answer behind a thought."""
OPENING, CLOSING = {*"\"'`“‘«"}, {*"\"'`”’»\\"}
THOUGHT_PARTS = re.compile(r"(?:redacted_)?(?:reasoning|thinking|thought)(?:[._]\w+)?")
THOUGHT_FIELDS = ("thinking", "reasoning", "reasoning_content", "summary", "text", "content")


def answer_text(text: str) -> str:
    """Return an answer without its thoughts: what may be executed, graded, counted or compared."""
    return split_thoughts(text)[0]


def split_thoughts(text: str) -> tuple[str, list[str]]:
    """Return an answer without its thoughts, and their texts; a text without any is not changed.

    A thought that is never closed has no answer behind it, where it begins a line. What stands before a lone end mark
    is a thought, since the template opened it.
    """
    spans = _thought_spans(text)
    if not spans and not FRAME.match(text.lstrip()):
        return text, []
    bounds = [0, *(bound for start, _, _, end in spans for bound in (start, end)), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    answer = FRAME_END.sub("", FRAME.sub("\n", "".join(pieces)))
    return answer.lstrip("\n"), [text[begin:end].strip() for _, begin, end, _ in spans]


def _thought_spans(text: str) -> list[tuple[int, int, int, int]]:
    """Return where each thought begins, its text begins and ends, and it ends; in order."""
    spans: list[tuple[int, int, int, int]] = []
    at, unclosed = 0, set[int]()
    lowered = text.lower()
    if not any(word in lowered for word in WORDS):  # a hundredth of the time of the search
        return spans
    while mark := MARK.search(text, at):
        at = max(mark.end(), at + (mark.end() == mark.start()))
        number = next((n for n in range(len(THOUGHTS)) if mark[f"open{n}"] is not None), None)
        if number is not None and not _is_quoted(text, mark.start(f"open{number}"), mark.end()):
            end = None
            if number not in unclosed:
                ends = ENDS[number].finditer(text, mark.end())
                end = next((end for end in ends if not _is_quoted(text, *end.span())), None)
            if end is None:
                unclosed.add(number)
                if mark["line"] is None and mark.start() > 0 and not (spans and spans[-1][3] == mark.start()):
                    continue  # a mention in a sentence
            closing = (len(text), len(text)) if end is None else end.span()
            spans.append((mark.start(), mark.end(), *closing))
            at = closing[1]
        elif mark["close"] is not None and not _is_quoted(text, *mark.span()):
            spans = [(0, spans[0][1] if spans and spans[0][0] == 0 else 0, *mark.span())]
    return spans


def _is_quoted(text: str, start: int, end: int) -> bool:
    """Return whether a mark stands in quotes, as in prose and programs about marks."""
    behind = text[end : end + 1]
    return text[start - 1 : start] in OPENING and behind in CLOSING and text[start - 3 : start] != "```"


def thought_of(part: Any) -> str | None:
    """Return the thought that a content part holds, "" where it is withheld; None for a part that is no thought."""
    if not isinstance(part, Mapping) or not (
        THOUGHT_PARTS.fullmatch(str(part.get("type"))) or part.get("thought") is True
    ):
        return None
    return "\n".join(_thought_texts(part))


def _thought_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from next((list(_thought_texts(value[name])) for name in THOUGHT_FIELDS if value.get(name)), [])
    elif isinstance(value, Sequence):
        for part in value:
            yield from _thought_texts(part)


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
    spans = _thought_spans(body) if start >= 0 else []
    while start >= 0:
        in_thought = any(begin <= start < end for begin, _, _, end in spans)
        calls = () if in_thought else _calls(body, start)
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
