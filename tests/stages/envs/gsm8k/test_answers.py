"""What counts as the final answer of a text: phrasings that people and math-verify call right, and wrong ones."""

import os
import time
import tomllib
from pathlib import Path

import pytest
from needs import REAL, needs

from composer_stages.envs.gsm8k.answers import final_answers, is_marked, is_right
from composer_stages.envs.task_table import read_rows

pytestmark = needs("math")
PHRASINGS = tomllib.loads((Path(__file__).parents[3] / "support" / "phrasings.toml").read_text("utf-8"))

MATHEMATICS = [
    *(
        ("\\frac{x}{2}", "\\boxed{\\frac{1}{2}x}", True),
        ("(1,2)", "\\boxed{(1, 2)}", True),
        ("(1,2)", "\\boxed{(2, 1)}", False),
    ),
    *(("x^2+2x+1", "The answer is $(x+1)^2$.", True), ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", True)),
    *(("[0,1)", "$[0,1)$", True), ("[0,1)", "$[0,1]$", False), ("2\\sqrt{3}", "#### \\sqrt{12}", True)),
    *(("2\\sqrt{3}", "\\boxed{12}", False), ("x=3", "\\boxed{3}", True), ("x>2", "\\boxed{x>2}", True)),
]


@pytest.mark.parametrize(("name", "right"), [("right", True), ("wrong", False)])
def test_phrasings(name: str, right: bool) -> None:
    texts = [(text, answer) for answer, texts in PHRASINGS[name].items() for text in texts]
    assert [(text, answer, final_answers(text)) for text, answer in texts if is_right(text, answer) is not right] == []


def test_expressions_are_equal_as_math_verify_decides() -> None:
    assert [row for row in MATHEMATICS if is_right(row[1], row[0]) is not row[2]] == []


def test_an_expression_without_end_is_wrong_and_the_next_answer_is_judged() -> None:
    began = time.monotonic()
    assert not is_right("#### 9^9^9^9^9", "9") and is_right("#### 9", "9")
    assert time.monotonic() - began < 60 * max(1.0, os.getloadavg()[0])


@pytest.mark.parametrize(
    ("text", "marked"), [("#### 7", True), ("\\boxed{7}", True), ("####", False), ("it is 7", False), ("", False)]
)
def test_is_marked(text: str, marked: bool) -> None:
    assert is_marked(text) is marked


@needs("real")
def test_recorded_verdicts_on_the_solutions_of_four_models() -> None:
    rows = read_rows(REAL / "multi-answers" / "gsm8k_example_model_solutions.800.jsonl.gz")
    verdicts = [
        (is_right(answer["solution"], final_answers(row["ground_truth"])[0]), answer["is_correct"])
        for row in rows
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(verdicts) == 3200 and all(ours is recorded for ours, recorded in verdicts)
