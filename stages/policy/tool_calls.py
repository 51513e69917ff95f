"""Conversations and tool calls as chat completions have them, and tool calls as model families write them.

A recorded conversation holds calls in the text of its assistant messages (`composer_stages.messages`). A server gets
them as `tool_calls`, each answered by a message of role `tool` with its id, together with the tools that the source
declared. What the protocol cannot express stays text, and its results come from the user: calls of undeclared tools (no
`tools` at all), arguments that are no JSON object, calls without a result each. Reasoning is not sent: it was the
student's own, and servers refuse it or leave it out; one that refuses answers without it gets it. Pictures and sounds
are gaps: a mark in the text shows where one was.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from composer_stages import json_text
from composer_stages.messages import (
    DECODER,
    UNREADABLE,
    Message,
    MessageParts,
    ToolCall,
    is_object,
    read,
    split_thoughts,
    write,
)
from composer_stages.policy.faults import REASONING

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What servers take as the name of a function."""
ROLES = {"system", "user", "assistant"}
NO_PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"name": "say", "description": "Say a word.", "parameters": {"type": "object", "properties": {}}}
PROBED_FIELDS: dict[str, Any] = {"seed": 1, "tools": [{"type": "function", "function": TOOL}], "logprobs": True}
"""Request fields that the probe tries."""


def declare_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools as chat completions declare them, from OpenAI's nested or flat form or Anthropic's.

    A tool whose name no server would take is left out.
    """
    declarations: list[dict[str, Any]] = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not NAME.fullmatch(str(function.get("name", ""))):
            continue
        parameters = function.get("parameters") or function.get("input_schema") or NO_PARAMETERS
        about = {"description": function["description"]} if isinstance(function.get("description"), str) else {}
        declaration = {"name": function["name"], **about, "parameters": parameters}
        declarations.append({"type": "function", "function": declaration})
    return declarations


def chat_messages(messages: Sequence[Message], *, with_tools: bool, thoughts: bool = False) -> list[dict[str, Any]]:
    """Return messages as a server reads them: no role, field or order that the protocol does not have.

    thoughts: add the thoughts of answers, empty where there are none, for servers that want them back.
    """
    sent: list[dict[str, Any]] = []
    answering: list[str] = []
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant":
            spoken = read(content)
            calls, thought = spoken.calls, {REASONING: spoken.reasoning or ""} if thoughts else {}
            results = takewhile(lambda following: following["role"] == "tool", messages[index + 1 :])
            # Strict servers refuse a call without a result, a result without a call, and arguments that are no object.
            native = with_tools and len(calls) == sum(1 for _ in results) > 0
            native = native and all(NAME.fullmatch(call.name) and is_object(call.arguments) for call in calls)
            if not native:
                answering = []
                sent.append({"role": "assistant", "content": write(MessageParts(spoken.content, calls)), **thought})
                continue
            # Nine letters and digits: some servers, Mistral's among them, take no other ids.
            answering = [f"call{len(sent):03d}{n:02d}" for n in range(len(calls))]
            called = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(answering, calls, strict=True)
            ]
            sent.append({"role": "assistant", "content": spoken.content or None, "tool_calls": called, **thought})
        elif role == "tool" and answering:
            sent.append({"role": "tool", "tool_call_id": answering.pop(0), "content": content})
        else:
            sent.append({"role": role if role in ROLES else "user", "content": content})
    return sent


# Below: the formats of model families, for models whose server does not parse tool calls. Sources: the model cards
# and chat templates of Qwen3 (Hermes' format), Qwen3-Coder and Qwen 3.5 (vLLM's parser qwen3_coder), Llama 3.1, Mistral
# (tokenizers v3 and v11), DeepSeek V3 and V3.1, and OpenAI's harmony format for gpt-oss. What looks like a call but is
# malformed still counts as a call, with a name or arguments that no tool has: it is the model's mistake, which the
# environment answers.

END = re.compile(
    r"((<\|(?:im_end|eot_id|eom_id|eot|end_of_text|endoftext|END_OF_TURN_TOKEN|return|call|end)\|>"
    r"|</s>|<eos>|<end_of_turn>|<turn\|>|<｜end▁of▁sentence｜>)\s*+)++\Z"
)


def without_end(text: str) -> str:
    """Return an answer without the tokens that end it, which some servers leave in its text (mzau/mlx-knife#20)."""
    return text if "<s>" in text else END.sub("", text)  # </s> ends what HTML strikes out, too


def normalise_calls(form: str, text: str) -> str:
    """Return an answer in a family's format as `messages.write` writes it; other forms change nothing.

    What looks like a call in a thought is none.
    """
    reader = FORMATS.get(form)
    if reader is None:
        return text
    written = without_end(text)
    if reader is gpt_oss:
        parts = gpt_oss(written)
    else:
        answer, thoughts = split_thoughts(written)
        parts = reader(answer)
        parts = replace(parts, reasoning="\n".join(thoughts) or None) if parts.calls else MessageParts(written)
    # JSON can spell half of a surrogate pair, which no file can keep.
    return write(parts).encode(errors="replace").decode()


def qwen3(text: str) -> MessageParts:
    """Read a JSON object of name and arguments in a tag `<tool_call>`, as often as there are calls."""
    content, mark, body = text.partition("<tool_call>")
    blocks = [block.partition("</tool_call>")[0] for block in body.split("<tool_call>")] if mark else []
    return MessageParts(content.strip("\n") if blocks else text, tuple(_call(block) for block in blocks))


FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def qwen3_coder(text: str) -> MessageParts:
    """Read `<function=NAME>` with a `<parameter=NAME>` for each argument, as Qwen 3.5 and Nemotron 3 write calls, too.

    Values are text, as nothing here knows the schema: `envs.boundary.check_call` reads them by their declared types.
    """
    content, mark, rest = text.partition("<function=")
    if not mark:
        return qwen3(text)
    calls = []
    for name, inner in FUNCTION.findall(text) or [("", mark + rest)]:
        values = dict(PARAMETER.findall(inner))
        is_malformed = inner.strip() and not values
        arguments = inner.strip() if is_malformed else json.dumps(values, ensure_ascii=False)
        calls.append(ToolCall(name.strip(), arguments))
    return MessageParts(content.strip().removesuffix("<tool_call>").strip("\n"), tuple(calls))


def llama3(text: str) -> MessageParts:
    """Read a JSON object of name and parameters, perhaps behind `<|python_tag|>`; semicolons separate several."""
    content, tag, tagged = text.rpartition("<|python_tag|>")
    body = (tagged if tag else text).strip()
    # Without the tag an answer in JSON is a call only where the object begins as a call does.
    if not tag and not re.match(r'\{\s*"(name|type)"\s*:', body):
        return MessageParts(text)
    return MessageParts(content.strip(), tuple(map(_call, _objects(body, ";"))))


def mistral(text: str) -> MessageParts:
    """Read `[TOOL_CALLS]` before a JSON list of calls (v3), or before each name with `[ARGS]` and arguments (v11)."""
    content, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return MessageParts(text)
    calls: list[ToolCall] = []
    for part in body.split("[TOOL_CALLS]"):
        name, args, arguments = part.partition("[ARGS]")
        if args:
            calls.append(ToolCall(name.partition("[CALL_ID]")[0].strip(), arguments.strip()))
            continue
        if bare := re.fullmatch(r"\s*([\w-]+)\s*(\{.*\})\s*", part, re.DOTALL):  # where [ARGS] was left out as special
            calls.append(ToolCall(bare[1], bare[2]))
            continue
        try:
            value = json_text.loads(part)
        except UNREADABLE:
            calls.append(_call(part))
            continue
        several = value if isinstance(value, list) else [value]
        calls += [_call(json.dumps(call, ensure_ascii=False)) for call in several]
    return MessageParts(content.strip(), tuple(calls))


def deepseek(text: str) -> MessageParts:
    """Read calls between their marks: `function`, a separator, name and fenced JSON (V3), or name, separator, JSON."""
    content, mark, marked = text.partition("<｜tool▁calls▁begin｜>")
    if not mark:
        return MessageParts(text)
    calls = []
    for block in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", marked, re.DOTALL):
        head, _, body = block.partition("<｜tool▁sep｜>")
        # No regular expression: `\s*` before a line takes the square of the blanks that a model may end in.
        line, fence, fenced = body.partition("\n```json\n")
        json_text, end, _ = fenced.partition("```")
        name, arguments = (line, json_text) if fence and end and "\n" not in line.lstrip() else (head, body)
        calls.append(ToolCall(name.strip(), arguments.strip()))
    return MessageParts(content.strip(), tuple(calls))


def gpt_oss(text: str) -> MessageParts:
    """Read harmony's messages: analysis is reasoning, one `to=functions.NAME` is a call, everything else is content."""
    reasoning, content, calls = list[str](), list[str](), list[ToolCall]()
    for number, part in enumerate(re.split(r"<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>", text)):
        header, mark, body = part.partition("<|message|>")
        if not mark:
            # What comes before the first header belongs to the one that the template wrote: analysis.
            opened = reasoning if number == 0 and "<|message|>" in text else content
            opened += [part] if part.strip() not in ("", "assistant") else []
        elif to := re.search(r"to=(?:functions\.)?([^\s<]+)", header):
            calls.append(ToolCall(to[1], body.strip()))
        elif "<|channel|>analysis" in header:
            reasoning.append(body)
        else:
            content.append(body)
    return MessageParts("\n".join(content), tuple(calls), "\n".join(reasoning) or None)


ARGUMENTS = ("arguments", "parameters")
"""Names of a call's arguments in JSON: Llama's is the second."""
FORMATS: dict[str, Callable[[str], MessageParts]] = {
    "qwen3": qwen3,
    "qwen3-coder": qwen3_coder,
    "llama3": llama3,
    "mistral": mistral,
    "deepseek": deepseek,
    "gpt-oss": gpt_oss,
}
"""`policy.tool_calls` -> how an answer is read."""
if TYPE_CHECKING:
    CallForm = str
else:
    CallForm = Literal["none", "native", *FORMATS]
"""`none`, `native` or a key of `FORMATS`."""


def _call(text: str) -> ToolCall:
    """Return a call written as a JSON object; in a malformed one the name is what looks like it, or empty.

    Models mix the families' names of arguments up (so vLLM's parser of Llama's format reads both); an object with
    another name for them is malformed, not a call without any.
    """
    try:
        value = json_text.loads(text)
    except UNREADABLE:
        value = None
    call: dict[str, Any] = value if isinstance(value, dict) else {}
    key_of_arguments = next((key for key in ARGUMENTS if key in call), None)
    has_other_key = key_of_arguments is None and call.keys() - {"name", "type", "id"}
    if not isinstance(call.get("name"), str) or has_other_key:
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return ToolCall(name[1] if name else "", text.strip())
    arguments = call[key_of_arguments] if key_of_arguments else {}
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["name"], as_text)


def _objects(text: str, between: str) -> list[str]:
    """Return the consecutive JSON values of a text; an unreadable rest is the last element."""
    objects: list[str] = []
    at = 0
    while at < len(text):
        try:
            _, end = DECODER.raw_decode(text, at)
        except UNREADABLE:
            return [*objects, text[at:]]
        objects.append(text[at:end])
        at = end
        while at < len(text) and text[at] in between + " \n":
            at += 1
    return objects
