"""How models write tool calls where no server reads them for us: five families' formats, read into one.

Sources: the model cards and chat templates of Qwen3 (Hermes' format), Llama 3.1, Mistral (tokenizers v3 and v11),
DeepSeek V3 and V3.1, and OpenAI's harmony format for gpt-oss. What looks like a call and is none is a call all the
same, with a name or arguments that no tool has: the model's mistake, which the environment answers.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from stages.messages import DECODER, Spoken, ToolCall, write

END = re.compile(r"(<\|(?:im_end|eot_id|eom_id|end_of_text|return|call|end)\|>|</s>|<｜end▁of▁sentence｜>)\s*$")


def canonical(form: str, text: str) -> str:
    """An answer in the format of a family as `stages.messages.write` writes it; "none" and "native" leave it alone."""
    reader = FORMATS.get(form)
    return text if reader is None else write(reader(END.sub("", text)))


def qwen3(text: str) -> Spoken:
    """`<tool_call>`, a JSON object of name and arguments, `</tool_call>`; as often as there are calls."""
    content, mark, rest = text.partition("<tool_call>")
    blocks = [block.partition("</tool_call>")[0] for block in rest.split("<tool_call>")] if mark else []
    return Spoken(content.strip("\n") if blocks else text, tuple(_call(block) for block in blocks))


def llama3(text: str) -> Spoken:
    """A JSON object of name and parameters alone, perhaps behind `<|python_tag|>`; several stand behind semicolons."""
    content, tag, rest = text.rpartition("<|python_tag|>")
    body = (rest if tag else text).strip()
    if not tag and not re.match(r'\{\s*"(name|type)"\s*:', body):
        return Spoken(text)
    objects = _objects(body, ";")
    return Spoken(content.strip(), tuple(_call(one, "parameters") for one in objects))


def mistral(text: str) -> Spoken:
    """`[TOOL_CALLS]` before a JSON list of calls (v3), or before each name with `[ARGS]` and its arguments (v11)."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return Spoken(text)
    calls: list[ToolCall] = []
    for part in rest.split("[TOOL_CALLS]"):
        name, args, arguments = part.partition("[ARGS]")
        if args:
            calls.append(ToolCall(name.partition("[CALL_ID]")[0].strip(), arguments.strip()))
        else:
            calls += _listed(part)
    return Spoken(content.strip(), tuple(calls))


def deepseek(text: str) -> Spoken:
    """Between marks of calls: `function`, a separator, the name and fenced JSON (V3), or name, separator, JSON."""
    content, mark, rest = text.partition("<｜tool▁calls▁begin｜>")
    if not mark:
        return Spoken(text)
    calls = []
    for block in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", rest, re.DOTALL):
        head, _, body = block.partition("<｜tool▁sep｜>")
        fenced = re.match(r"\s*([^\n]*)\n```json\n(.*?)\n?```", body, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head, body)
        calls.append(ToolCall(name.strip(), arguments.strip()))
    return Spoken(content.strip(), tuple(calls))


def gpt_oss(text: str) -> Spoken:
    """Messages of harmony: analysis is reasoning, one `to=functions.NAME` is a call, everything else is content."""
    reasoning, content, calls = [], [], []
    for part in re.split(r"<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>", text):
        header, mark, body = part.partition("<|message|>")
        if not mark:
            content += [part] if part.strip() not in ("", "assistant") else []
        elif to := re.search(r"to=(?:functions\.)?([^\s<]+)", header):
            calls.append(ToolCall(to[1], body.strip()))
        elif "<|channel|>analysis" in header:
            reasoning.append(body)
        else:
            content.append(body)
    return Spoken("\n".join(content), tuple(calls), "\n".join(reasoning) or None)


FORMATS: dict[str, Callable[[str], Spoken]] = {
    "qwen3": qwen3,
    "llama3": llama3,
    "mistral": mistral,
    "deepseek": deepseek,
    "gpt-oss": gpt_oss,
}
"""`policy.tool_calls` -> how an answer is read."""


def _call(text: str, arguments: str = "arguments") -> ToolCall:
    """A call written as a JSON object; of another text the name is what stands there as one, or nothing."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        named = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        return ToolCall(named[1] if named else "", text.strip())
    return ToolCall(value["name"], _text(value.get(arguments, {})))


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _listed(text: str) -> list[ToolCall]:
    try:
        found = json.loads(text)
    except ValueError:
        return [_call(text)]
    return [_call(json.dumps(one, ensure_ascii=False)) for one in (found if isinstance(found, list) else [found])]


def _objects(text: str, between: str) -> list[str]:
    """The JSON values that follow each other in a text; from where there is none, the rest as it is."""
    found: list[str] = []
    at = 0
    while at < len(text):
        try:
            _, end = DECODER.raw_decode(text, at)
        except ValueError:
            return [*found, text[at:]]
        found.append(text[at:end])
        at = end
        while at < len(text) and text[at] in between + " \n":
            at += 1
    return found
