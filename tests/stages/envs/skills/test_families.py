"""The families: right answers by other means than those that draw them, and what is held out."""

import json
import re
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from composer_stages.envs.config import EnvConfig
from composer_stages.envs.skills import families
from composer_stages.envs.skills.families import FAMILIES, HELD_OUT, TEMPLATES, Exercise, in_words
from composer_stages.runs import store

WAYS = {
    "date-long": lambda asked: datetime.strptime(asked, "%B %d, %Y").date().isoformat(),
    "date-dotted": lambda asked: datetime.strptime(asked, "%d.%m.%Y").date().isoformat(),
    "date-short": lambda asked: datetime.strptime(asked, "%d %b %Y").date().isoformat(),
    "date-weekday": lambda asked: datetime.strptime(asked, "%A, %B %d, %Y").date().isoformat(),
    "time-colon": lambda asked: datetime.strptime(asked, "%I:%M %p").strftime("%H:%M"),
    "time-dotted": lambda asked: datetime.strptime(asked, "%I.%M %p").strftime("%H:%M"),
    "snake-camel3": lambda asked: re.sub(r"(?<!^)([A-Z])", r"_\1", asked).lower(),
    "snake-title3": lambda asked: asked.lower().replace(" ", "_"),
    "case-dots": lambda asked: asked.replace(" ", "."),
    "case-title": lambda asked: asked.title().replace("_", " "),
    "reverse-three": lambda asked: " ".join(asked.split()[::-1]),
    "sort-numbers": lambda asked: ", ".join(sorted(asked.split(", "), key=int)),
    "drop-number": lambda asked: asked.partition(", ")[2],
    "reverse-numbers": lambda asked: ", ".join(asked.split(", ")[::-1]),
    "sort-descending": lambda asked: ", ".join(sorted(asked.split(", "), key=int, reverse=True)),
    "choose-smallest3": lambda asked: min(asked.split(", "), key=int),
    "length-digits": lambda asked: str(sum(map(str.isdigit, asked))),
    "find-email": lambda asked: next(word for word in asked.split() if "@" in word),
    "find-both": lambda asked: f"{asked.split()[0]}, {asked.split()[-1]}",
    "list-arrows": lambda asked: asked.replace(", ", " -> "),
    "length-words": lambda asked: str(asked.count(" ") + 1),
    "find-thing": lambda asked: asked.split()[3],
}
"""The answer from the part of the question behind its colon, computed otherwise."""


def drawn(family: str, number: int = 30) -> list[Exercise]:
    rng = Random(family)
    return [FAMILIES[family](rng) for _ in range(number)]


@pytest.mark.parametrize("family", WAYS)
def test_answers_equal_an_independent_computation(family: str) -> None:
    for one in drawn(family):
        assert WAYS[family](one.question.partition(": ")[2]) == one.answer


def test_each_template_holds_out_one_family() -> None:
    assert len(FAMILIES) >= 40 and len(TEMPLATES) >= 12 and len(HELD_OUT) == len(TEMPLATES)
    assert all(len(variants) > 1 and "-" not in name for name, variants in TEMPLATES.items())
    assert {name.partition("-")[0] for name in HELD_OUT} == set(TEMPLATES)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_one_line_and_no_constant_is_right(family: str) -> None:
    for one in drawn(family):
        assert one.answer == one.answer.strip() and len(one.answer.splitlines()) == 1
        assert "cases" not in one.check or len({repr(result) for _, result in one.check["cases"]}) > 1, one
        json.dumps(one.check)


def test_numbers_in_words() -> None:
    told = {0: "zero", 20: "twenty", 42: "forty-two", 100: "one hundred", 319: "three hundred and nineteen"}
    assert {number: in_words(number) for number in told} == told
    assert len({in_words(number) for number in range(1000)}) == 1000


def test_identity_depends_on_the_families() -> None:
    digests = [store.file_sha256(Path(families.__file__).with_suffix(ending)) for ending in (".py", ".toml")]
    assert EnvConfig(name="skills").identity()["content_sha256"] == store.digest(digests)
