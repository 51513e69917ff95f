"""Thoughts in the text of an answer and in content parts: what is neither executed nor graded nor counted."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_stages.data_files import load_toml

MARKS = load_toml(__package__, "thoughts.toml")
THOUGHTS = [
    (begin.replace("TAG", MARKS["tag"]), end.replace("TAG", MARKS["tag"]), alone)
    for alone, marks in ((True, MARKS["alone"]), (False, MARKS["pairs"]))
    for begin, end in marks
]
"""The begin and end marks of a thought, and whether the end may stand alone, where the template opened the thought."""
MARK = re.compile(
    "|".join(
        (
            *MARKS["data"],
            f"(?P<line>^[ \t]*)?(?:{'|'.join(f'(?P<open{n}>{begin})' for n, (begin, _, _) in enumerate(THOUGHTS))})",
            f"(?P<close>{'|'.join(end for _, end, alone in THOUGHTS if alone)})",
        )
    ),
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
BEGINNINGS = (begin.removeprefix(r"\A") for begin, _, alone in THOUGHTS if alone)
OPENED = re.compile(rf"(?:{'|'.join(BEGINNINGS)})\s*\Z", re.IGNORECASE)
"""The end of an opening in which the template begins a thought."""
ENDS = [re.compile(end, re.IGNORECASE) for _, end, _ in THOUGHTS]
FRAME = re.compile(rf"(?:<\|(?:end|eom)\|>)?(?:<\|(?:start|begin)\|>assistant)?(?:{'|'.join(MARKS['frames'])})")
FRAME_END = re.compile(rf"(?:{'|'.join(MARKS['frame_ends'])})\s*\Z")
"""What families write around the answer behind a thought."""
OPENING, CLOSING = {*"\"'`“‘«"}, {*"\"'`”’»\\"}
THOUGHT_PARTS = re.compile(MARKS["parts"])


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
    if not any(word in lowered for word in MARKS["words"]):  # a hundredth of the time of the search
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


def thoughts_beside(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning that is apart from an answer, in a field of its own or in parts of content."""
    for name in MARKS["beside"]:
        if not (value := message.get(name)):
            continue
        parts = value if isinstance(value, list) else [value]
        typed = [{"type": "thinking"} | part if isinstance(part, dict) else part for part in parts]
        if thought := "\n".join(filter(None, (part if isinstance(part, str) else thought_of(part) for part in typed))):
            return thought
    content = message.get("content")
    return "\n".join(filter(None, map(thought_of, content))) or None if isinstance(content, list) else None


def _thought_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from next((list(_thought_texts(value[name])) for name in MARKS["fields"] if value.get(name)), [])
    elif isinstance(value, Sequence):
        for part in value:
            yield from _thought_texts(part)
