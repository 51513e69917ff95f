"""Thoughts in the text of an answer and in content parts: what is neither executed nor graded nor counted."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The marks are those of the reasoning parsers of vLLM 0.11 and of the chat
# templates of TRL 1.16; what a template opens, the text of an answer only closes.

TAG = r"(?:\w{1,16}[:|])?(?:\w{1,16}_)?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)(?:[:_]\w{1,16})?"
THOUGHTS = (
    (rf"<{TAG}>", rf"</{TAG}>", True),
    (r"\[THINK\]", r"\[/THINK\]", True),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>", True),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>", True),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>", True),
    ("◁think▷", "◁/think▷", True),
    (r"<\|channel>thought\b", r"<channel\|>", True),  # Gemma 4
    (r"<unused94>thought\b", "<unused95>", True),  # MedGemma
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>", True),  # Kimi K3
    (r"\AHere are my reasoning steps:", r"\[BEGIN FINAL RESPONSE\]", True),  # Apriel
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
WORDS = (
    "think",
    "thought",
    "reasoning",
    "reflection",
    "scratchpad",
    "<|",
    "|>",
    "<unused95>",
    "[begin final response]",
)
"""One of which every mark holds."""
BEGINNINGS = (begin.removeprefix(r"\A") for begin, _, alone in THOUGHTS if alone)
OPENED = re.compile(rf"(?:{'|'.join(BEGINNINGS)})\s*\Z", re.IGNORECASE)
"""The end of an opening in which the template begins a thought."""
ENDS = [re.compile(end, re.IGNORECASE) for _, end, _ in THOUGHTS]
FRAME = re.compile(
    r"(?:<\|(?:end|eom)\|>)?(?:<\|(?:start|begin)\|>assistant)?(?:<\|channel\|>(?:final|commentary)\s*<\|message\|>"
    r"|<\|content\|>| ?to=user<\|message\|>|<\|START_(?:RESPONSE|TEXT)\|>|<\|begin_of_solution\|>"
    r"|<\|open\|>response<\|sep\|>)"
)
FRAME_END = re.compile(
    r"(?:<\|(?:end|return|eom|eot|END_(?:RESPONSE|TEXT)|end_of_solution)\|>|\[END FINAL RESPONSE\]"
    r"|<\|close\|>response<\|sep\|>(?:<\|close\|>message<\|sep\|>)?)\s*\Z"
)
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
    spans = thought_spans(text)
    if not spans and not FRAME.match(text.lstrip()):
        return text, []
    bounds = [0, *(bound for start, _, _, end in spans for bound in (start, end)), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    answer = FRAME_END.sub("", FRAME.sub("\n", "".join(pieces)))
    return answer.lstrip("\n"), [text[begin:end].strip() for _, begin, end, _ in spans]


def thought_spans(text: str) -> list[tuple[int, int, int, int]]:
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
