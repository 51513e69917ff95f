"""Find what shows a result that a row expects of its calls and scripts: to other calls, or to the agent.

A result that stands in an argument of another call, in the prompt or in a delivered file need not be computed: its call
is a visible test. The ground of a row rests on its other calls. Only texts are compared: a result that is told in other
words is not noticed.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from composer_stages.envs.repo import trees
from composer_stages.sandbox.equality import equal, formatted
from composer_stages.words import Sentence

EASY = frozenset(map(str, (None, True, False, 0, 1, -1, "")))
"""Texts of results that need no look: code that guesses them needs none either."""
SHORTEST = 3
"""Characters of a result that tells something wherever it stands; a shorter one does in a line with its function."""
LARGEST = 1 << 20
"""Bytes of a file that is searched."""


@dataclass(frozen=True, eq=False)
class ExpectedResult:
    """One result of a call or script: its test, the word that names what gives it, what that is called with."""

    test: str
    word: str
    inputs: Sequence[Any]
    value: Any


def expected_results(
    row: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], tests: Sequence[str]
) -> Iterator[ExpectedResult]:
    """Yield what each call returns and each script prints or writes; `tests` are their names, in order."""
    for test, call in zip(tests, calls, strict=False):
        inputs = [*call["args"], *call["kwargs"].values()]
        yield ExpectedResult(
            test, call["function"].rpartition(":")[2], inputs, None if call["raises"] else call["returns"]
        )
    for test, script in zip(tests[len(calls) :], row["script"], strict=True):
        words = [PurePosixPath(word).name for word in script["command"].split() if "." in word] or [script["command"]]
        for text in (script["stdout"], *script["files"].values()):
            yield ExpectedResult(test, words[0], [script["command"], script["stdin"]], text)


def find_shown(results: Sequence[ExpectedResult], prompt: str, files: trees.Changes) -> dict[ExpectedResult, str]:
    """Return the results that are shown, each with the first test, file or prompt that holds it."""
    texts = {"the prompt": prompt}
    texts |= {
        path: file.data.decode(errors="replace") for path, file in files.items() if file and len(file.data) <= LARGEST
    }
    places: dict[ExpectedResult, str] = {}
    for result in filter(_needs_a_look, results):
        # The inputs of a call are its own: what it is given it may return.
        others = (test for test in results if test.inputs != result.inputs)
        holding = [test.test for test in others if any(_contains(value, result.value) for value in test.inputs)]
        holding += [where for where, text in texts.items() if _is_told(text, result)]
        if holding:
            places[result] = holding[0]
    return places


def describe_shown(places: Mapping[ExpectedResult, str]) -> str:
    """Return in words what shows which results; "" for none."""
    copies = dict.fromkeys((result.test, where) for result, where in places.items())
    return Sentence("envs.tasks.results-shown", shown=[*copies]) if copies else ""


def decide_nothing(results: Sequence[ExpectedResult], places: Mapping[ExpectedResult, str]) -> bool:
    """Return whether results are shown, and the others are as easy to guess as `None`: no pass rests on them."""
    return bool(places) and not any(_needs_a_look(result) and result not in places for result in results)


def _needs_a_look(result: ExpectedResult) -> bool:
    return _text(result.value) not in EASY and result.value not in ([], {})


def _contains(value: Any, expected: Any) -> bool:
    """Return whether a value contains the expected one, as a part or as a word of its text: 31 does not contain 3."""
    if equal(value, expected, json=True):
        return True
    if isinstance(value, dict | list | tuple | set):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return any(_contains(part, expected) for part in parts)
    text = _text(expected)
    if not isinstance(expected, int | float) and not re.fullmatch(r"-?[\d.]+", text):
        return isinstance(value, str) and isinstance(expected, str) and text in value
    # Zeros behind the point tell nothing: 7.50 is 7.5.
    number = re.escape(text) + (r"0*" if "." in text else "")
    return re.search(rf"(?<![\d.]){number}(?!\d|\.\d)", re.sub(r"python[\d.]+", "", _text(value))) is not None


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else formatted(value)


THOUSANDS = re.compile(r"(?<=\d)[,_](?=\d{3}(?!\d))")
UNIFORM = str.maketrans({"(": "[", ")": "]", "'": '"', **dict.fromkeys(" \t\r\n")})
"""Of containers white space, the kind of brackets and of quotes tell nothing."""


def _is_told(text: str, result: ExpectedResult) -> bool:
    """Return whether a text holds a result as a word: a short one only in a line that names what gives it."""
    value = result.value
    if isinstance(value, list | tuple | dict):
        spellings = {formatted(value), json.dumps(value, default=formatted, ensure_ascii=False)}
        uniform = [spelling.translate(UNIFORM) for spelling in spellings]
        # A short one may be an index: [1].
        return any(len(spelling) > SHORTEST and spelling in text.translate(UNIFORM) for spelling in uniform)
    spelling = _text(value)
    words = re.escape(re.sub(r"\s+", " ", spelling)).replace(r"\ ", r"\s+")
    for match in re.finditer(rf"(?<![\w.]){words}(?![\w]|\.\d)", THOUSANDS.sub("", text)):
        before, after = match.string[: match.start()], match.string[match.end() :]
        line = before.rpartition("\n")[2] + spelling + after.partition("\n")[0]
        if len(spelling) >= SHORTEST or re.search(rf"(?<!\w)(?<!def ){re.escape(result.word)}(?!\w)", line):
            return True
    return False


def hidden_inputs(row: Mapping[str, Any]) -> str:
    """Return, in words, the first call or script that runs a hidden file; "" for none.

    No other hidden file is written where calls or scripts decide: code under test could read it.
    """
    for path in row["hidden"]:
        module = re.sub(r"^(src|lib)/", "", path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if any(call["function"].partition(":")[0] == module for call in row["calls"]):
            return Sentence("envs.tasks.runs-hidden-file", path=path)
        words = (
            rf"(?<![\w.-])({re.escape(path)}|{re.escape(PurePosixPath(path).name)}|-m\s+{re.escape(module)})(?![\w-])"
        )
        if any(re.search(words, script["command"]) for script in row["script"]):
            return Sentence("envs.tasks.runs-hidden-file", path=path)
    return ""
