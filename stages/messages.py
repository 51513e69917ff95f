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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import count, takewhile
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from composer_stages import json_text
from composer_stages.thoughts import (
    OPENED,
    answer_text as answer_text,
    split_thoughts as split_thoughts,
    thought_of as thought_of,
    thought_spans,
    thoughts_beside as thoughts_beside,
)

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


def without_calls(content: str) -> str:
    """Return content without the calls in it: those that a program gives beside it, too, would count twice."""
    return write(replace(read(content), calls=()))


def with_thought(answer: str, thought: str | None) -> str:
    """Return an answer with the thought that its server gave apart; the answer alone where `read` would not tell it."""
    if not thought:
        return answer
    text = write(replace(read(answer), reasoning=thought))
    return text if read(text).reasoning == thought else answer


def thoughts_apart(messages: Iterable[Message]) -> list[Message]:
    """Return messages with the thoughts of answers beside their content, where chat templates look for them."""
    apart = []
    for message in messages:
        parts = read(message["content"]) if message["role"] == "assistant" else MessageParts("")
        if parts.reasoning is not None:
            content = write(replace(parts, reasoning=None))
            message = {**message, "content": content, "reasoning_content": parts.reasoning}
        apart.append(message)
    return apart


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
    spans = thought_spans(body) if start >= 0 else []
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


CALL_IDS = ("call{number:05}", "functions.{name}:{number}")
"""Ids of calls in a rendering: Mistral's templates want nine letters and digits, Kimi's write no other name."""


def number_calls(
    conversation: Iterable[Message], numbers: Iterator[int], call_id: str = "call_{number}"
) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: calls apart from the content with numbered ids, which results repeat."""
    waiting: list[str] = []
    converted: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] == "assistant":
            parts = read(message["content"])
            waiting = [call_id.format(name=call.name, number=next(numbers)) for call in parts.calls]
            calls = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(waiting, parts.calls, strict=True)
            ]
            thought = {} if parts.reasoning is None else {"reasoning_content": parts.reasoning}
            called = {"tool_calls": calls} if calls else {}
            converted.append({"role": "assistant", "content": parts.content, **thought, **called})
        elif message["role"] == "tool":
            of_call = waiting.pop(0) if waiting else call_id.format(name="unknown", number=next(numbers))
            converted.append({**message, "tool_call_id": of_call})
        else:
            converted.append(dict(message))
    return converted


DIRECTIVE = re.compile(r"%[-_0^#]?[a-zA-Z]")
"""Of `strftime`, with the flags of the C library."""
PERCENT = "\u2063PERCENT\u2063"
ANY_DAY = date(2024, 7, 26)
"""For templates that write the date of today, so that equal runs have equal prompts."""
NOW = "strftime_now"
"""The function with which chat templates write the date of today."""
LITERAL = r'"(?:[^"\\]|\\.)*"|true|false|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?'
PINNED = re.compile(rf"\{{%- (?:set (?P<name>\w+) = (?:{LITERAL}) -|macro {NOW}\(.*?\{{%- endmacro -)%\}}", re.DOTALL)
"""A statement of `pin_settings`."""


def pin_settings(tokenizer: Any, settings: Mapping[str, bool | int | float | str], today: date | None) -> None:
    """Fix these settings, and the date, in a tokenizer's chat template, so that every later rendering uses them.

    They are statements before the template: a saved tokenizer renders alike elsewhere, and the template's digest covers
    them. Those of an earlier time, with which a checkpoint was saved, hold where no other is given. today: None for
    the earlier date, or `ANY_DAY`.
    """
    pinned, own = apart_pinned(tokenizer.chat_template)
    # Jinja reads the escapes of one character, and of those beyond 16 bits JSON has two halves.
    for name, value in sorted(settings.items()):
        pinned[name] = f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}"
    if NOW in own and (today or NOW not in pinned):
        # As transformers writes them, whose directives are those of this machine's library.
        directives = sorted({*DIRECTIVE.findall(own)})
        written = {"%%": PERCENT} | {name: (today or ANY_DAY).strftime(name) for name in directives} | {PERCENT: "%"}
        replaced = "".join(f" | replace({name!r}, {text!r})" for name, text in written.items() if name != text)
        pinned[NOW] = f"{{%- macro {NOW}(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro -%}}"
    tokenizer.chat_template = "".join([*pinned.values(), own])


def apart_pinned(template: str) -> tuple[dict[str, str], str]:
    """Return the statements of `pin_settings` before a chat template, by the names that they set, and the template."""
    pinned, end = dict[str, str](), 0
    while match := PINNED.match(template, end):
        pinned[match["name"] or NOW], end = match[0], match.end()
    return pinned, template[end:]


SENTINEL, QUESTION = "\u2063ANSWER\u2063", "\u2063QUESTION\u2063"
TRIMMED = f" <think>\nx\n</think>\n\n{SENTINEL}\n "
"""What a template changes that takes thoughts apart or cuts blanks off."""
MOST_OPENED = 100
"""Characters of the mark with which a template opens a thought, and of the blanks behind."""
CALLED = "called_tool"
"""Of the call in a probe; the tool that is declared has another name."""
PROBED_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
PROBED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probed_tool", "description": "probed", "parameters": PROBED_PARAMETERS},
}
Tools = Sequence[Mapping[str, Any]]
"""Tools as chat completions declare them."""


class TooManyTokens(Exception):
    """A text was not tokenised, because it has at least `least` tokens, more than the limit."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least:,} tokens")
        self.least = least


@dataclass(frozen=True)
class TurnForm:
    """How a chat template writes an answer.

    end: the special token behind the last answer, "" for none; of several `eos_token`, if earlier answers have it, too.
    closing: what is written behind the last answer, up to that token.
    opening: the end of an opening, from its last special token; None where this depends on the conversation. verbatim:
    whether the last answer is its text between these. rewrites: whether an answer that others follow is written
    otherwise; what was sampled stays as it was sampled.
    """

    end: str
    closing: str
    opening: str | None
    verbatim: bool
    rewrites: bool


def turn_form(tokenizer: Any) -> TurnForm:
    """Return how a tokenizer's chat template writes an answer."""
    return _known(tokenizer, "turn_form", lambda: _turn_form(tokenizer))


def _turn_form(tokenizer: Any) -> TurnForm:
    question: Message = {"role": "user", "content": QUESTION}
    answer, trimmed = ({"role": "assistant", "content": text} for text in (SENTINEL, TRIMMED))
    opening, full_text, changed = render(
        tokenizer, [([question], True), ([question, answer], False), ([question, trimmed], False)]
    )
    [followed] = render(tokenizer, [([question, answer, question], True)])
    _, _, closing = full_text.rpartition(SENTINEL)
    ending = None
    if SENTINEL in full_text:
        between = followed.rpartition(SENTINEL)[2]
        ending = _end_in_both(tokenizer, closing, between) or _special(tokenizer).search(closing)
    stop = len(closing) if ending is None else ending.end()
    last = max((match.start() for match in _special(tokenizer).finditer(opening)), default=0)
    return TurnForm(
        "" if ending is None else ending["token"],
        closing[:stop],
        opening[last:] if last and QUESTION not in opening[last:] else None,
        changed == f"{opening}{TRIMMED}{closing}",
        not followed.startswith(opening + SENTINEL),
    )


def render(tokenizer: Any, conversations: Sequence[tuple[Sequence[Message], bool]], tools: Tools = ()) -> list[str]:
    """Return conversations as the chat template writes them, each up to where an answer begins if it is said to.

    Thoughts, and tool calls where tools are given, are rendered from their parts where the template has them. What it
    has not, or refuses, is written in the nearest form that it takes: calls in the text, results as the user's, and
    messages of one role in a row as one. Tools are declared where the template can.
    """
    call_id = _call_id(tokenizer) if tools else None
    results = any(message["role"] == "tool" for messages, _ in conversations for message in messages)
    forms: list[Callable[[Sequence[Message]], list[Any]]] = []
    if call_id:
        forms = [partial(parsed_calls, call_id=call_id), partial(_written_calls, call_id=call_id)]
    elif not results or _takes_results(tokenizer):
        forms = [thoughts_apart if _writes_thoughts(tokenizer) else list]
    declared = list(tools) if tools and declares_tools(tokenizer) else None
    error: Exception | None = None
    for form in (*forms, _plain):
        try:
            return [
                tokenizer.apply_chat_template(
                    form(messages), tools=declared, tokenize=False, add_generation_prompt=answering
                )
                for messages, answering in conversations
            ]
        except Exception as raised:  # the template's author chooses what is raised
            error = error or raised
    assert error is not None  # noqa: S101
    raise error


def _written_calls(messages: Sequence[Message], call_id: str) -> list[Any]:
    return number_calls(messages, count(), call_id)


def parsed_calls(messages: Sequence[Message], call_id: str = CALL_IDS[0]) -> list[Any]:
    """Return messages with the arguments of calls as objects, which most templates write out."""
    rendered = _written_calls(messages, call_id)
    for call in (call for message in rendered for call in message.get("tool_calls", ())):
        if is_object(call["function"]["arguments"]):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return rendered


def _plain(messages: Sequence[Message]) -> list[Any]:
    """Return messages of the roles that every template has, in turn."""
    plain: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ("user", "assistant") and (role != "system" or plain):
            role = "user"
        if plain and plain[-1]["role"] == role:
            plain[-1] = {"role": role, "content": f"{plain[-1]['content']}\n\n{content}"}
        else:
            plain.append({"role": role, "content": content})
    return plain


def declares_tools(tokenizer: Any) -> bool:
    """Return whether a template tells the model of tools; one that fails on them does not."""
    return _known(
        tokenizer, "tools", lambda: PROBED_TOOL["function"]["name"] in _probed(tokenizer, {"user": "."}, True)
    )


def _call_id(tokenizer: Any) -> str | None:
    """Return with which ids a template writes calls from their parts, and their results; None if it does not."""
    return _known(tokenizer, "calls", lambda: next((each for each in CALL_IDS if _writes(tokenizer, each)), None))


def _one_call_each(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    """Return messages with each call before its own result, where a template does not write several calls of one."""
    if not tools or not _call_id(tokenizer) or _known(tokenizer, "several", lambda: _writes_several(tokenizer)):
        return messages
    apart, later = list[Message](), list[Message]()
    for message in messages:
        if later and message["role"] == "tool":
            apart += [message, later.pop(0)]
            continue
        parts = read(message["content"]) if message["role"] == "assistant" else MessageParts("")
        apart += later
        later = [{**message, "content": write(MessageParts("", (call,)))} for call in parts.calls[1:]]
        if later:
            message = {**message, "content": write(replace(parts, calls=parts.calls[:1]))}
        apart.append(message)
    return [*apart, *later]


def _writes_several(tokenizer: Any) -> bool:
    calls = tuple(ToolCall(CALLED, json.dumps({"a": text}, ensure_ascii=False)) for text in (QUESTION, SENTINEL))
    roles = {"user": ".", "assistant": write(MessageParts("", calls))}
    return SENTINEL in _probed(tokenizer, roles, True, _call_id(tokenizer), last=True)


def _takes_results(tokenizer: Any) -> bool:
    """Return whether a template writes the result of a call that stands in the text of an answer."""
    return _known(tokenizer, "results", lambda: _writes(tokenizer, None))


def _writes_thoughts(tokenizer: Any) -> bool:
    """Return whether a template writes the thought of an answer that is beside its content."""
    roles = {"user": ".", "assistant": write(MessageParts(SENTINEL, (), QUESTION))}
    return _known(tokenizer, "thoughts", lambda: QUESTION in _probed(tokenizer, roles, False, CALL_IDS[0], last=True))


def _writes(tokenizer: Any, call_id: str | None) -> bool:
    call = ToolCall(CALLED, json.dumps({"a": QUESTION}, ensure_ascii=False))
    roles = {"user": ".", "assistant": write(MessageParts("", (call,))), "tool": SENTINEL}
    text = _probed(tokenizer, roles, call_id is not None, call_id)
    return all(part in text for part in (CALLED, QUESTION, SENTINEL))


def _probed(
    tokenizer: Any, roles: Mapping[str, str], tools: bool, call_id: str | None = None, last: bool = False
) -> str:
    """Return a conversation as a template writes it in the first form that it takes, "" where it fails on all."""
    messages = [{"role": role, "content": content} for role, content in roles.items()]
    for form in (parsed_calls, _written_calls) if call_id else (None,):
        with suppress(Exception):  # the template's author chooses what is raised
            text: str = tokenizer.apply_chat_template(
                form(messages, call_id or "") if form else messages,
                tools=[PROBED_TOOL] if tools else None,
                tokenize=False,
                add_generation_prompt=not last,
            )
            return text
    return ""


def opening_ids(tokenizer: Any, messages: Sequence[Message], tools: Tools = (), most: float = math.inf) -> list[int]:
    """Return token ids of a conversation up to where the assistant's answer begins; `tokenizer` has a chat template.

    `TooManyTokens` where it must have more than `most`, as its characters show.
    """
    messages = _one_call_each(tokenizer, messages, tools)
    return _ids(tokenizer, render(tokenizer, [(messages, True)], tools)[0], most)


def following_ids(
    tokenizer: Any,
    new: Sequence[Message],
    most: float = math.inf,
    *,
    answer: str = "",
    last_id: int | None = None,
    tools: Tools = (),
) -> list[int]:
    """Return the token ids that the template puts behind the end of an answer, up to the next answer.

    new: the messages in between. answer, last_id: text and last token of the answer, which decide where its calls have
    no results without it, and where a template has several ends. The ids are found by rendering the messages behind a
    marked answer. `TooManyTokens` as of `opening_ids`.
    """
    marked, calls = MessageParts(SENTINEL), read(answer).calls if tools else ()
    if calls:  # in all of them: some templates write calls alone, and some the first alone
        mark = json.dumps({"a": SENTINEL}, ensure_ascii=False)
        marked = MessageParts("", tuple(ToolCall(call.name, mark) for call in calls))
    conversation: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": write(marked)}]
    alone, full_text = render(tokenizer, [(conversation, False), ([*conversation, *new], True)], tools)
    last = "" if last_id is None else str(tokenizer.convert_ids_to_tokens(last_id))
    last = last if _special(tokenizer).fullmatch(last) else ""
    if SENTINEL in alone and SENTINEL in full_text:
        closing, text = (rendered.rpartition(SENTINEL)[2] for rendered in (alone, full_text))
        stop, end = _end_of_answer(tokenizer, closing, text, last, bool(calls))
        text = text[stop:]
        if last and last != end and text.lstrip().startswith(last):
            text = text.lstrip()[len(last) :]  # the mark of the next role, which ends answers of GLM
    else:  # a template that leaves answers out
        text, end = full_text[length_in_common(alone, full_text) :], ""
    return _ids(tokenizer, text, most, behind=last or end or tokenizer.eos_token)


def _end_in_both(tokenizer: Any, closing: str, text: str, last: str = "", calls: bool = False) -> re.Match[str] | None:
    """Return the special token that ends an answer in two texts behind its content, in which they begin alike.

    Of several that which was sampled `last`, or `eos_token`: tokens before it end a part of the answer, such as a call.
    """
    ends = list(_special(tokenizer).finditer(text, 0, length_in_common(closing, text)))
    same = (list[re.Match[str]](end for end in ends if end["token"] == each) for each in (last, tokenizer.eos_token))
    ends = next(filter(None, same), ends)
    return ends[-1 if calls else 0] if ends else None


def _end_of_answer(tokenizer: Any, closing: str, text: str, last: str, calls: bool) -> tuple[int, str]:
    """Return where an answer ends in the text behind its content, and the token that ends it, "" for none.

    closing: the text where nothing follows the answer. Both begin alike, up to the end token, but where the template
    ends its last answer with a token of its own.
    """
    if end := _end_in_both(tokenizer, closing, text, last, calls):
        return end.end(), end["token"]
    first = _leading_special(tokenizer, text)
    if first is None or _leading_special(tokenizer, closing) is None:
        return 0, ""
    # An end, if the user's messages have it too; else it begins the next message.
    [opening] = render(tokenizer, [([{"role": "user", "content": QUESTION}], True)])
    of_user = _leading_special(tokenizer, opening.rpartition(QUESTION)[2])
    same = of_user is not None and of_user["token"] == first["token"]
    return (first.end(), first["token"]) if same else (0, "")


def answer_ids(tokenizer: Any, messages: Sequence[Message], answer: str, tools: Tools = ()) -> tuple[list[int], int]:
    """Return the token ids of an answer with the token that ends it, as `DPOTrainer` trains on them.

    Also the number of tokens at the end of the opening that they replace, where the template opens a thought that it
    does not write into an answer without one, or closes an empty one before an answer that has one. What the template
    leaves out of an answer stays as it was said.
    """
    form, parts = turn_form(tokenizer), read(answer)
    opening, common = form.opening or "", len(form.opening or "")
    full_text = f"{_begun(opening, answer)}{form.closing}"
    apart = (tools and parts.calls) or (parts.reasoning and _writes_thoughts(tokenizer))
    if form.opening is None or not form.verbatim or apart:
        said: Message = {"role": "assistant", "content": answer}
        messages = _one_call_each(tokenizer, messages, tools)
        opening, full_text = render(tokenizer, [(messages, True), ([*messages, said], False)], tools)
        common = length_in_common(opening, full_text)
        needed = [parts.content.strip(), (parts.reasoning or "").strip(), *(call.name for call in parts.calls)]
        ending = opening[-MOST_OPENED:]
        fits = (
            common == len(opening)
            or OPENED.search(ending)
            or any(not ending[end:].strip() for *_, end in thought_spans(ending))
        )
        if fits and all(full_text.count(part, common) >= needed.count(part) for part in needed):
            at = full_text.rfind(form.end, common) if form.end else -1
            stop = at + len(form.end)
            # A call may end otherwise than an answer, and what stands before it as an answer ends (GPT-OSS).
            full_text = full_text if at < 0 or (parts.calls and full_text[stop:].strip()) else full_text[:stop]
        else:
            full_text, common = f"{_begun(opening, answer)}{form.closing}", len(opening)
    start = max((match.start() for match in _special(tokenizer).finditer(opening, 0, common)), default=0)
    before, ids = (_ids(tokenizer, text[start:], math.inf) for text in (opening, full_text))
    num_common = length_in_common(before, ids)
    return ids[num_common:], len(before) - num_common


def _begun(opening: str, answer: str) -> str:
    """Return an answer behind its opening; where that opens a thought with which the answer begins, once."""
    mark, said = OPENED.search(opening), answer.lstrip()
    if mark is None or not said.startswith(mark[0].strip()):
        return opening + answer
    behind = said.removeprefix(mark[0].strip())
    return opening + (behind.lstrip("\n") if mark[0].endswith("\n") else behind)


def length_in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the beginning that two texts, or two lists of token ids, have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def end_id(tokenizer: Any) -> int | None:
    """Return the id of the token that ends an answer: that of the template, else the tokenizer's own, if it has one."""
    end = turn_form(tokenizer).end
    return tokenizer.convert_tokens_to_ids(end) if end else tokenizer.eos_token_id


def _special(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of a tokenizer's special tokens, as the group `token`."""
    return _known(tokenizer, "special", lambda: _special_pattern(tokenizer))


def _special_pattern(tokenizer: Any) -> re.Pattern[str]:
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    return re.compile(f"(?P<token>{'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")


def _leading_special(tokenizer: Any, text: str) -> re.Match[str] | None:
    """Return the special token that a text begins with, behind blanks."""
    return _special(tokenizer).match(text, len(text) - len(text.lstrip()))


Fact = TypeVar("Fact")
_FACTS: WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = WeakKeyDictionary()


def _known(tokenizer: Any, name: str, find: Callable[[], Fact]) -> Fact:
    """Return a fact about a tokenizer with its template, found once."""
    facts = _FACTS.setdefault(tokenizer, {})
    key = (name, str(tokenizer.chat_template))
    if key not in facts:
        facts[key] = find()
    return facts[key]


def _ids(tokenizer: Any, text: str, most: float, behind: str | None = None) -> list[int]:
    """Return the token ids of a text, at the beginning of a conversation or behind a special token."""
    # To tokenise 50 MB takes gigabytes; to count its characters takes nothing.
    if len(text) > most and (least := least_tokens(tokenizer, text)) > most:
        raise TooManyTokens(least)
    if behind and text:
        # Some tokenizers put a blank before a text that begins a conversation, and some tokens take in blanks behind.
        first, *ids = tokenizer(behind + text, add_special_tokens=False)["input_ids"]
        if first == tokenizer.convert_tokens_to_ids(behind):
            return ids
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return plain


def least_tokens(tokenizer: Any, text: str) -> int:
    """Return a number of tokens that a text has at least, by its characters and the longest token of the vocabulary.

    White space does not count: special tokens may take in any amount of it. 0 for tokenizers that drop characters, or
    make one token of any number of them: only byte-pair encodings without normaliser, or with NFC, are known not to.
    """
    longest = _known(tokenizer, "longest", lambda: _longest_token(tokenizer))
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
