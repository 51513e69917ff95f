r"""What counts as the final answer of a text, and whether it equals the right one, which math-verify decides.

The final answer is the last that the text marks: by `####`, `\boxed{}`, `<answer>` or the words "answer is"; where it
marks none, the bold or the last number of its last line with a number. A heading is no mark (#### Step 2: May). Several
answers side by side, 18 or 19, have to be equal. Behind a sum stands its result, behind a number its unit.
"""

import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from math import factorial
from pathlib import Path
from typing import IO, cast

from composer_stages.data_files import load_toml
from composer_stages.errors import InfrastructureError, UsageError

LONGEST = 400
"""Characters of an answer."""
WORKER = Path(__file__).with_name("worker.py")

ATOM = r"(?:\d+(?:\.\d+)?|\.\d+)%?"
FRACTION = r"\d{0,20}\s{0,20}(?:\\[dt]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|\\sqrt\s*\{[^{}]*\})"
"""With a whole number before it. What repeats is bounded, as models repeat: time linear in the answer."""
QUANTITY = re.compile(
    rf"[-+]?(?:{FRACTION})|(?<![A-Za-z0-9_.^/])(?<!\d:)(?<!\^\{{)[-+]?\({{0,9}}[-+]?{ATOM}\)*(?:\s*(?:\*\*|[-+*/^])\s*[({{]*[-+]?{ATOM}[)}}]*)*(?!\.?\d|[:%_]\d|_\{{|[A-Za-z]\d|[xyzni]\b|\s?π)"
)
"""A number, or an expression of numbers; times of day are none."""
HEADING = re.compile(r"(?i)(?:step|part|case|problem|question|solution(?!\s*[:=]\s*\S)|note)\b|\d+[.):]\s+[a-z]")
ENUMERATOR = re.compile(r"^\s*\d+[.)]\s+(?=\D)")
ASIDE = re.compile(r"(?<=[\w%])\s+\([^()]*\)|(?<=\*\*)\s+\([^()]*[A-Za-z][^()]*\)")
"""What stands in brackets behind a word or number, or behind bold text."""
REASON = re.compile(r"(?i)[\s,;]+(?:since|because|where|when|as|if|given|assuming|provided)\b")
"""What begins why or when an answer holds, with numbers of its own: 30 since 25 = 30 - 5."""
FACTORIAL = re.compile(r"(?<![\d.,])(1?\d|20)!(?![!=])")
TAG = re.compile(r"(?is)<answer>(.*?)(?:</answer>|\Z)")
HASHES = re.compile(r"(?<!#)####(?!#)(.*)")
PHRASE = re.compile(
    r"(?i)(?<!\bwrong )(?<!incorrect )(?<!\bfalse )"
    r"\b(?:answers?|correct (?:option|choice))\b[\s*_\"']*(?:\bis\b|\bare\b|[:=])[\s*_:\"']*(.*)"
)
NOT = re.compile(r"(?i)(?:is )?(?:not|neither|never)\b")
INSTEAD = re.compile(
    r"(?i)(?:is )?not\b.*?(?:\bbut\b|\brather\b"
    r"|[.,;]\s+(?:it|that|the (?:correct |right )?answer)(?:['’]s| is)\b)\s*(.*)"
)
"""What is the answer after a number that is not: not 30 but 25."""
DENIED = re.compile(r"(?i)\b(?:not|neither|never|can(?:no|'|’)t be)\s+[-$€£(]*$")
DENYING = re.compile(r"(?i)[^\w.]*(?:is|was) (?:not|wrong|incorrect)\b")
"""What stands before, and behind, a number that is said not to be the answer."""
CORRECTION = re.compile(r"(?i)\b(?:wait|correction|scratch that|make that|i mean|sorry)\b")
BEFORE_PHRASE = re.compile(r"(?i)(.*)\bis (?:the|my) (?:final |correct )?answer\b")
BOLD = re.compile(r"\*\*(.+?)\*\*|__(.+?)__")
JOINED = re.compile(
    r"(?i)[\s*_]*(?:[a-z°]+[\s*_]+){0,2}?[a-z°]*[\s*_]*(?:,|;|&|[–—]|\bor\b|\band\b|\bto\b)[\s*_]*(?:also )?"
    r"|\s+|\s*(?:'|(?:h|hrs?|hours?|min|minutes?|days?|weeks?|months?|years?|ft|feet|foot|lbs?|pounds?|dollars?)\b)\s*"
)
"""What stands between two answers side by side, or between the parts of one in two units."""
BOX = re.compile(r"\\(?:f?boxed|fbox|framebox)\s*\{")
DISPLAY = {r"\[": r"\]", "$$": "$$"}
"""What begins a formula on lines of its own, and what ends it."""
FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
OPERATION = (
    r"(?:\\?\w+\{)?\s*(?:[ap]m|and|base|choose|cos|cubed|dozen|factorial|log|minus|mod|or|over|pi|plus|sin|sqrt)\b"
)
UNIT = re.compile(
    rf"(?i)(?:\\?\s|\\,|~)*(?!{OPERATION}|(?:squared|tan|times|to)\b)"
    r"(?:\\(?:text|mathrm|textbf|mbox)\s*\{\s*[A-Z ]+\}|(?<![A-Z\\])[A-Z]{2,}(?: [A-Z]+)*)(?:\^\{?\d\}?)?\s*\Z"
)
"""What stands behind the number of a right answer: 18 dollars."""
CHOICE = re.compile(r"\W*(?:(?i:option|choice)\W+)?(?:\(([A-J])\).*|([A-J])(?:[).:]\s.*|, not .*|\W*))")
"""A letter of several choices, with what it stands for: (B) 12."""
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[ '’-][^\W\d_]+)*")
"""Words, of which one has three letters: AB may be a segment, and xy a product."""
VARIABLES, MOST_VARIABLES = "abcdefghijklmn pqrstuvwxyz", 4
"""Letters of variables, of which so many in this order are a product and no word: abc, xyz."""
DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?([./])\d\d?\1\d{4}")
COMPOUND = re.compile(r"(?=.*\d)(?:[A-Z][a-z]?(?:_?\d+|_\{\d+\})?){2,}")
"""The formula of a chemical compound: H2O."""
BASE = re.compile(r"(?<![A-Za-z\\])\b[0-9A-F]+_\{?(\d+)\}?")
"""A number and its base: 204_5."""
HALF_OF_DAY = re.compile(r"(?i)\b([ap])\.?\s?m\b")
TIME = re.compile(
    r"(?i)(?<![\d:.])(?<!^-)(?<!\s-)(\d\d?)(?::([0-5]\d))?(?::([0-5]\d))?(?![\d:]|\.\d)(?:\s*([ap])\.?\s?m\b\.?)?"
)
"""A time of day: its hour, minutes, seconds and half."""
TIME_WORDS = {
    r"(?i)(?<=\d)\.(?=[0-5]\d\s*[ap]\.?\s?m\b)": ":",
    r"(?i)\s*\bo['’]clock\b": "",
    r"(?i)\s+in\s+the\s+morning\b": " am",
    r"(?i)\s+(?:in\s+the\s+(?:afternoon|evening)|at\s+night)\b": " pm",
}
"""Other writings of a time -> those of `TIME`."""
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
DIGITS = str.maketrans(SUPERSCRIPTS, "0123456789-")
WRITINGS = load_toml(__package__, "writings.toml")
"""Writings of signs and of numbers -> those that math-verify reads."""
DECIMAL_COMMA = re.compile(r"(?<![\d.,(\[])(0|\d+(?=,(?:\d{1,2}|\d{4,})(?!\d))),(\d+)(?![\d,]|\.\d)")
"""Of an answer: a right one, 1,2, may be a list."""
THOUSANDS = re.compile(
    r"(?<![\d.])[1-9]\d{0,2}(?:([ \u00a0\u2009\u202f'’_,])\d{3})(?:\1\d{3})*(?!\d)"
    r"|(?<![\d.])\d{1,2}(?:,\d\d)+,\d{3}(?!\d)"
)


@cache
def require_math_verify() -> None:
    """Raise UsageError where math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise UsageError("envs.gsm8k.no-math-verify")


def is_right(text: str, right: str) -> bool:
    """Return whether the final answer of a text is the right one."""
    require_math_verify()
    number = number_of(right)
    answers = final_answers(text, is_number=bool(number))
    if choice := _choice(right):
        answers = [_choice(answer) or answer for answer in answers]
    halves = [{*HALF_OF_DAY.findall(part.lower())} for part in (right, " ".join(answers))]
    if all(halves) and halves[0] != halves[1]:  # math-verify leaves them out
        return False
    if not (number or choice):
        if (time := TIME.fullmatch(_bare(right))) and (time[4] or any(map(HALF_OF_DAY.search, answers))):
            return bool(answers) and all(_gives_time(answer, time) for answer in answers)
        if words := _words(right):
            return bool(answers) and {_plain_words(answer) for answer in answers} == {words}
        bases = {match[1] for text in (right, *answers) for match in BASE.finditer(text)}
        if BASE.search(right) and len(bases) > 1:  # which math-verify leaves out
            return False
    right = number or choice or right
    if not number:
        right, *answers = map(_latex, (right, *answers))
    if answers and all(_judge.is_equal(right, answer) for answer in dict.fromkeys(answers)):
        return True
    return len(answers) > 1 and not number and _judge.is_equal(right, ", ".join(answers))


def boxed(solution: str) -> str:
    """Return what the last boxes of a solution hold, or the text where it has none."""
    return ", ".join(_boxes(_without_line_breaks(solution).replace("\n", " "))).strip() or solution


def number_of(right: str) -> str:
    """Return the number that a right answer is, in one writing and without its unit; "" where it is none."""
    if DATE.fullmatch(right.strip()):
        return ""
    for text in (right, UNIT.sub("", right)):
        text = plain(text).strip()
        if QUANTITY.fullmatch(text) and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", text):
            return text
    return ""


def _words(right: str) -> str:
    """Return a right answer of words, or a date, as `_plain_words`; "" for one that is mathematics.

    math-verify reads letters as a product, in which their order is nothing, and a date as a subtraction.
    """
    text = _bare(right)
    is_product = len(text) <= MOST_VARIABLES and text in VARIABLES
    is_words = WORDS.fullmatch(text) and not is_product
    return _plain_words(right) if is_words or DATE.fullmatch(text) or COMPOUND.fullmatch(text) else ""


def _bare(text: str) -> str:
    """Return a text without the marks of LaTeX around all of it and around its words."""
    return TEXT.sub(r"\1", text).strip("$ ")


def _gives_time(answer: str, right: re.Match[str]) -> bool:
    """Return whether every time of an answer is the right one; one without a half of the day may have either.

    A number is a time with a half, with minutes, or alone: 3 hours is none.
    """
    text = _bare(answer)
    for pattern, writing in TIME_WORDS.items():
        text = re.sub(pattern, writing, text)
    times = [time for time in TIME.finditer(text) if time[2] or time[4] or time.span() == (0, len(text))]
    return bool(times) and all(_second(time, right) == _second(right, time) for time in times)


def _second(time: re.Match[str], other: re.Match[str]) -> int:
    """Return the second of the day, in the half of the other time where a time of 1 to 12 o'clock has none."""
    hour, minute, second = (int(part or 0) for part in time.groups()[:3])
    if (half := time[4] or other[4]) and 1 <= hour <= 12:
        hour = hour % 12 + 12 * (half.lower() == "p")
    return (hour * 60 + minute) * 60 + second


def _plain_words(text: str) -> str:
    """Return words in small letters, without the marks of LaTeX."""
    return " ".join(re.sub(r"[_{}$\\]", "", TEXT.sub(r"\1", text)).replace("-", " ").casefold().split()).rstrip(".")


def _choice(text: str) -> str:
    """Return the letter of an answer that is one of several choices; "" for another answer."""
    match = CHOICE.fullmatch(plain(text))
    return (match[1] or match[2]) if match else ""


def is_marked(text: str) -> bool:
    r"""Return whether a text marks a number as its answer, by `####`, `\boxed{}` or `<answer>`."""
    text = plain(_without_line_breaks(text), decimal_comma=True)
    marks = [*TAG.findall(text), *(mark for line in text.splitlines() for mark in _marks(line, phrases=False))]
    return any(QUANTITY.search(mark) for mark in marks)


def final_answers(text: str, *, is_number: bool = True) -> list[str]:
    """Return the final answer of a text, as expressions; several where it gives several, none where it gives none."""
    text = _without_line_breaks(text)
    text = plain(text, decimal_comma=True) if is_number else text
    if tags := TAG.findall(text):
        text = tags[-1]
    if marks := _marked_lines(text):
        return [answer for mark in marks for answer in _expressions(mark, is_number)]
    lines = [line for line in text.splitlines() if line.strip()]
    if not is_number:
        last = lines[-1] if lines else ""
        if bold := re.findall(r"(?<![\w)])\*\*(.+?)\*\*(?!\w)", last):
            return _expressions(bold[-1], is_number)
        formulas = [*FORMULA.finditer(last)]
        return _expressions(last[_begin_of_last(last, formulas) :] if formulas else last, is_number)
    for line in reversed(lines):
        line = _without_asides(ENUMERATOR.sub("", line))
        if not HEADING.match(line.strip(" #*")) and (numbers := [*QUANTITY.finditer(line)]):
            bold = [match[1] or match[2] for match in BOLD.finditer(line)]
            if marked := [mark for mark in bold if QUANTITY.search(mark)]:
                return _expressions(marked[-1], is_number)
            before, behind = line[: numbers[-1].start()], line[numbers[-1].end() :]
            if DENIED.search(before) or DENYING.match(behind):
                return []
            return _expressions(line[_begin_of_last(line, numbers) :], is_number)
    return []


def plain(text: str, *, decimal_comma: bool = False) -> str:
    """Return a text with one writing of numbers, signs and operators."""
    text = _without_superscripts(text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = unicodedata.normalize("NFKC", text.replace("\N{MINUS SIGN}", "-"))
    text = re.sub(r"[^\W0-9a-z]", lambda match: str(unicodedata.decimal(match[0], match[0])), text)
    text = re.sub(r"(?<![\w.])[–‒—](?=\s?[$€£¥]?\d)", "-", text)
    for pattern, replacement in WRITINGS["signs"]:
        text = re.sub(pattern, replacement, text)
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if decimal_comma:
        text = DECIMAL_COMMA.sub(r"\1.\2", text)
    for pattern, replacement in WRITINGS["numbers"]:
        text = re.sub(pattern, replacement, text)
    return text


def _without_superscripts(text: str) -> str:
    return re.sub(f"[{SUPERSCRIPTS}]+", lambda match: f"^{{{match[0].translate(DIGITS)}}}", text)


def _latex(text: str) -> str:
    """Return an expression that is written as in a program, or in Unicode, as LaTeX."""
    text = _without_superscripts(text)
    for pattern, replacement in WRITINGS["expressions"]:
        text = re.sub(pattern, replacement, text)
    return text


def _marked_lines(text: str) -> list[str]:
    """Return what the last marked line marks, and the marked lines right before it."""
    lines = text.splitlines()
    marked: list[str] = []
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if not line.strip():
            continue
        behind = next((line_behind for line_behind in lines[number + 1 :] if line_behind.strip()), "")
        marks = [mark for mark in _marks(line, behind=behind) if mark.strip()]
        if marks:
            marked += marks
        elif marked:
            break
    return marked


def _marks(line: str, *, behind: str = "", phrases: bool = True) -> Iterator[str]:
    """Yield what a line marks as an answer; a mark at its end stands for the next line."""
    boxes = list(_boxes(line))
    yield from boxes
    rest = re.sub(BOX.pattern + r".*\}", "", line) if boxes else line
    hashes = HASHES.search(rest)
    if hashes:
        content = hashes[1].strip(" *_#")
        if phrase := PHRASE.search(content):
            content = phrase[1]
        elif HEADING.match(content) or (behind and content[:1].isalpha() and "=" not in content):
            return
        if content or behind:
            yield content or behind
    elif phrases and not boxes:
        if phrase := PHRASE.search(rest):
            said = phrase[1]
            while (later := PHRASE.search(said)) and QUANTITY.search(later[1]) and not NOT.match(later[1]):
                said = later[1]
            yield said.strip(" *_") or behind
        elif phrase := BEFORE_PHRASE.match(rest):
            numbers = [*QUANTITY.finditer(phrase[1])]
            yield phrase[1][_begin_of_last(phrase[1], numbers) :] if numbers else phrase[1]


def _boxes(line: str) -> Iterator[str]:
    r"""Yield the contents of the last `\boxed{}`, and of those side by side with it: others were steps."""
    ends: list[tuple[int, int]] = []
    for start, begin, end in _spans(line):
        if DENIED.search(line[max(start - LONGEST, 0) : start]):
            continue
        between = line[ends[-1][1] + 1 : start].replace("$", "") if ends else ""
        ends = [*(ends if not between.strip() or JOINED.fullmatch(between) else []), (begin, end)]
    # Outside of boxes the sign is an exclamation mark.
    yield from (FACTORIAL.sub(lambda of: str(factorial(int(of[1]))), line[begin:end]) for begin, end in ends)


def _spans(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield where each box of a text starts, where its content begins, and where that ends."""
    closed, opened = dict[int, int](), list[int]()  # One pass: answers of thousands of boxes that never end are sent.
    for brace in re.finditer(r"\\.|[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            closed[opened.pop()] = brace.start()
    for match in BOX.finditer(text):
        if match.end() in closed:
            yield match.start(), match.end(), closed[match.end()]


def _without_line_breaks(text: str) -> str:
    """Return a text whose boxes and formulas stand on one line each."""
    text = "".join(map(_displays_on_one_line, re.split(r"(\n\s*\n)", text)))
    for _, begin, end in _spans(text):
        text = text[:begin] + text[begin:end].replace("\n", " ") + text[end:]
    return text


def _displays_on_one_line(paragraph: str) -> str:
    """Return a paragraph whose displayed formulas stand on one line each; one that does not end is no formula."""
    marks = list(re.finditer(r"\\[\[\]]|\$\$", paragraph))
    last = {mark[0]: mark.start() for mark in marks}
    parts, done, opening = list[str](), 0, None
    for mark in marks:
        if opening and mark[0] == DISPLAY[opening[0]]:
            formula = paragraph[opening.start() : mark.end()]
            parts += [paragraph[done : opening.start()], " ".join(formula.split())]
            done, opening = mark.end(), None
        elif not opening and last.get(DISPLAY.get(mark[0], ""), 0) > mark.start():
            opening = mark
    return "".join([*parts, paragraph[done:]])


def _begin_of_last(line: str, numbers: list[re.Match[str]]) -> int:
    """Return where the last number of a line begins, or the first of those that stand in a list or before an `or`."""
    begin = numbers[-1].start()
    for before, number in zip(numbers[-2::-1], numbers[:0:-1], strict=True):
        between = line[before.end() : number.start()]
        if not re.fullmatch(r"\s*[,;]\s*", between) and not (
            JOINED.fullmatch(between) and re.search(r"(?i)\bor\b", between)
        ):
            break
        begin = before.start()
    return begin


def _without_asides(text: str) -> str:
    """Return a text without what stands in brackets, unless its numbers stand there alone: twelve (12)."""
    bare = ASIDE.sub(" ", text)
    return bare if QUANTITY.search(bare) else text


def _expressions(mark: str, is_number: bool) -> list[str]:
    """Return the expressions of a marked text: one, or several that stand side by side."""
    mark = mark.strip(" *_`:#\t").rstrip(".")
    if NOT.match(mark):
        instead = INSTEAD.match(mark)
        if not instead or NOT.match(instead[1]):
            return []
        mark = instead[1]
    if not is_number:
        formulas = _side_by_side(mark, [*FORMULA.finditer(mark)])
        if formulas and not mark[: formulas[0].start()].strip(" (*"):
            mark = ", ".join(next(filter(None, formula.groups())) for formula in formulas)
        return [mark.strip("$ ").rstrip(".")[:LONGEST]] if mark else []
    mark = next((part for part in reversed(CORRECTION.split(mark)) if QUANTITY.search(part)), mark)
    mark = ASIDE.sub(lambda aside: "" if "=" in aside[0] else aside[0], mark)
    if (reason := REASON.search(mark)) and QUANTITY.search(mark[: reason.start()]):
        mark = mark[: reason.start()]
    _, sign, result = mark.rpartition("=")
    mark = result if sign and re.search(r"\d", result) else mark
    if "\\" in mark:
        return [re.split(r"(?<![\\a-zA-Z])[A-Za-z]{2,}", mark.strip())[0][:LONGEST]]
    mark = _without_asides(mark)
    return [match[0][:LONGEST] for match in _side_by_side(mark, [*QUANTITY.finditer(mark)])]


def _side_by_side(text: str, matches: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """Return the first match, and those that stand side by side with it."""
    side_by_side = [*matches[:1]]
    for before, match in pairwise(matches):
        if not JOINED.fullmatch(text[before.end() : match.start()]):
            break
        side_by_side.append(match)
    return side_by_side


class _Judge:
    """The worker, started when it is first asked, and again where an answer has ended it or this process is a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    @lru_cache(maxsize=4096)  # noqa: B019 - there is one judge
    def is_equal(self, right: str, answer: str) -> bool:
        """Return whether an answer equals the right one; InfrastructureError where no worker can be started."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._process, self._owner = _start(), os.getpid()
            requests, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
            requests.write(json.dumps([right, answer]) + "\n")
            requests.flush()
            # Without a line the answer has ended the worker: no expression that can be evaluated.
            line = answers.readline()
            if not line:
                self._process.wait()
            return line == "true\n"


def _start() -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-I", str(WORKER)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    if cast(IO[str], process.stdout).readline() != "ready\n":
        raise InfrastructureError("envs.gsm8k.math-verify-fails", code=process.wait())
    return process


_judge = _Judge()
