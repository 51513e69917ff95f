"""What a model is shown of a package, and what of an answer can be tried: good answers, bad ones and hostile ones."""

import json
import textwrap
from typing import Any

import pytest
from support.sample_package import SHELF

from composer_stages.envs.feature_deletion import selection
from composer_stages.envs.feature_deletion.definitions import definitions
from composer_stages.envs.feature_deletion.selection import A_QUESTION, MAX_SYMBOLS, PAGE_CHARS, Proposals, printable

TEXTS = {path: textwrap.dedent(text) for path, text in SHELF.items() if path.startswith("shelf/")}
UNTESTED = "Shelf.__len__"
BOOKS, WORDS = "shelf/books.py", "shelf/words.py"


def covered() -> dict[str, dict[int, frozenset[str]]]:
    """As if one test executed every line but those of one method."""
    lines: dict[str, dict[int, frozenset[str]]] = {}
    for path, text in TEXTS.items():
        for one in definitions(path, text):
            if one.kind == "function" and one.qualname != UNTESTED:
                lines.setdefault(path, {}).update(dict.fromkeys(one.body_lines, frozenset({"tests/test_all.py::test"})))
    return lines


def proposals(split: str | None = "train", seed: int = 0) -> Proposals:
    return Proposals("shelf-1.5", TEXTS, covered(), seed=seed, split=split, difficulties=("easy", "hard"))


def answer(*features: tuple[Any, Any]) -> str:
    return json.dumps({"features": [{"feature": name, "symbols": symbols} for name, symbols in features]})


def of_half(half: str) -> list[str]:
    found = selection.split_definitions(TEXTS, covered())
    return [f"{d.path}:{d.qualname}" for d in found[half] if d.code]


def test_question_lists_names_of_one_split_and_no_code() -> None:
    for half, other in (("train", "eval"), ("eval", "train")):
        text = proposals(half).question()[0]["content"]
        assert all(f"{name} (" in text for name in of_half(half)) and of_half(half)
        assert not any(f"{name} (" in text for name in of_half(other)) and of_half(other)
        assert "letters_of_names" not in text and "1 tests)" in text


def test_questions_alternate_between_splits() -> None:
    asked = proposals(None)
    first = asked.question()
    asked.take("{}")
    assert asked.question() != first
    asked.take("{}")
    assert asked.question() == first


def test_large_package_is_outlined_in_pages() -> None:
    body = "\n".join(f"def name_of_function_{i}(a):\n    b = a\n    c = b\n    return c" for i in range(900))
    text = {"big/one.py": body}
    lines = {"big/one.py": dict.fromkeys(range(1, 3601), frozenset({"t.py::t"}))}
    asked = Proposals("big", text, lines, seed=0, split="train", difficulties=("easy",))
    seen = set()
    for _ in range(8):
        shown = asked.question()[0]["content"]
        assert len(shown) < PAGE_CHARS + 2_000
        seen |= {line.partition(" ")[0] for line in shown.splitlines() if line.startswith("big/one.py:")}
        asked.take("")
    halves = selection.split_definitions(text, lines)
    assert seen == {f"big/one.py:{d.qualname}" for d in halves["train"]}


def test_valid_proposals_become_removals() -> None:
    one, two, *_ = [name for name in of_half("train") if not name.startswith(f"{BOOKS}:Shelf")]
    asked = proposals()
    asked.take("Here you are:\n```json\n" + answer(("labels", [one]), ("both", [two, one])) + "\n```\nAnything else?")
    assert asked.refused == []
    assert [removal.feature for removal in asked.removals] == ["labels", "both"]
    assert set(asked.removals[1].names) == {one, two} and asked.removals[1].kind == "cluster"
    assert f"- {one}\n" in asked.question()[0]["content"]
    asked.take(answer(("again", [one])))
    assert len(asked.removals) == 2 and asked.refused == ["named before"]


def test_methods_go_with_their_class() -> None:
    half = "train" if f"{BOOKS}:Shelf" in of_half("train") else "eval"
    asked = proposals(half)
    asked.take(answer(("shelves", [f"{BOOKS}:Shelf.add", f"{BOOKS}:Shelf"])))
    (removal,) = asked.removals
    assert removal.names == [f"{BOOKS}:Shelf"] and removal.kind == "class"


def test_equal_answers_give_equal_removals() -> None:
    names = of_half("train")
    said = answer(*[(name, [name]) for name in names[:A_QUESTION]])
    made = []
    for seed in (*range(40), 0):
        asked = proposals(seed=seed)
        asked.take(said)
        made.append(tuple(removal.identity for removal in asked.removals))
    assert made[0] and made[-1] == made[0] and len({*made}) > 1


REFUSED: dict[str, tuple[str, str]] = {
    "nothing": ("", "an answer holds no list of features"),
    "prose": ("I would delete the labels.", "an answer holds no list of features"),
    "cut off": (answer(("labels", [f"{WORDS}:titled"]))[:-9], "an answer holds no list of features"),
    "another object": ('{"feature": "labels"}', "an answer holds no list of features"),
    "no list": ('{"features": "all of them"}', "an answer holds no list of features"),
    "an empty list": ('{"features": []}', "an answer names no feature"),
    "nested a hundred thousand times": ('{"features": ' + "[" * 100_000, "an answer holds no list of features"),
    "a number of a million digits": ('{"features": [' + "9" * 1_000_000, "an answer holds no list of features"),
    "begun a hundred thousand times": ('{"features": ' * 100_000, "an answer holds no list of features"),
    "no symbols": (answer(("labels", [])), f"no list of one to {MAX_SYMBOLS} symbols"),
    "symbols are a word": (answer(("labels", "titled")), f"no list of one to {MAX_SYMBOLS} symbols"),
    "a feature is a number": ('{"features": [7]}', f"no list of one to {MAX_SYMBOLS} symbols"),
    "all symbols": (answer(("all", [f"{WORDS}:titled"] * 9)), f"no list of one to {MAX_SYMBOLS} symbols"),
    "a symbol is an object": (answer(("x", [{"path": WORDS}])), "the package has no such symbol: "),
    "a symbol is not there": (answer(("x", [f"{WORDS}:gone"])), f"the package has no such symbol: {WORDS}:gone"),
    "a file outside": (
        answer(("x", ["../../../etc/passwd:root"])),
        "the package has no such symbol: ../../../etc/passwd:root",
    ),
    "a test": (
        answer(("x", ["tests/test_words.py:test_titled"])),
        "the package has no such symbol: tests/test_words.py:test_titled",
    ),
    "signs that steer a terminal": (answer(("x", ["\x1b[2J\u202e\ud800x"])), "the package has no such symbol: [2Jx"),
    "an untested symbol": (
        answer(("x", [f"{BOOKS}:{UNTESTED}"])),
        f"no test executes a symbol's code: {BOOKS}:{UNTESTED}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_proposal_is_refused_with_its_reason(case: str) -> None:
    said, reason = REFUSED[case]
    asked = proposals()
    asked.take(said)
    assert (asked.refused, asked.removals) == ([reason], [])


def test_symbols_of_the_other_split_and_small_ones_are_refused() -> None:
    asked = proposals("train")
    asked.take(answer(("x", [of_half("eval")[0]])))
    assert asked.refused == [f"a symbol of the other split: {of_half('eval')[0]}"]
    small = f"{BOOKS}:Shelf.__init__"
    half = "train" if small in of_half("train") else "eval"
    asked = proposals(half)
    asked.take(answer(("x", [small])))
    assert asked.refused[0].startswith("not 3 to 400 lines of code: 2")


def test_more_features_than_asked_for_are_not_read() -> None:
    asked = proposals()
    asked.take(answer(*[("x", [f"{WORDS}:nowhere"])] * 500))
    assert len(asked.refused) == A_QUESTION + 1
    assert asked.refused[-1] == "an answer names more features than were asked for: 500"


def test_printable_removes_control_characters() -> None:
    assert printable("a\x1b]0;title\x07b\nc\u2028" + "x" * 1000) == "a]0;titlebc" + "x" * 109
    assert printable(7) == "" and printable(None) == ""
