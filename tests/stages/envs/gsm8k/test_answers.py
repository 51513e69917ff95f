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

MATHEMATICS: dict[str, tuple[list[str], list[str]]] = {
    "\\frac{x}{2}": (["\\boxed{\\frac{1}{2}x}", "\\framebox{x/2}", "\\[\n\\frac x2\n\\]"], ["\\boxed{\\frac{1}{x}2}"]),
    "(1,2)": (["\\boxed{(1, 2)}", "The answer is $(1,2)$, as 1 + 1 = 2."], ["\\boxed{(2, 1)}"]),
    "x^2+2x+1": (["The answer is $(x+1)^2$.", "$$\nx^2 + 2x + 1.\n$$", "x**2 + 2*x + 1"], ["\\boxed{x^2}"]),
    "x**2 + 2": (["\\boxed{x^2+2}", "x² + 2"], ["\\boxed{x^3+2}"]),
    "\\{1,2\\}": (
        ["\\boxed{\\{2,1\\}}", "\\boxed{2} and \\boxed{1}", "$x = 1$ or $x = 2$"],
        ["\\boxed{1}", "\\boxed{1}, \\boxed{3}"],
    ),
    "[0,1)": (["$[0,1)$", "\\boxed{[0,1)}, not \\boxed{[0,1]}"], ["$[0,1]$"]),
    "2\\sqrt{3}": (["#### \\sqrt{12}"], ["\\boxed{12}"]),
    "x=3": (["\\boxed{3}"], ["\\boxed{2}"]),
    "x>2": (["\\boxed{x>2}"], ["\\boxed{x<2}"]),
    "pi/2 + sqrt(2)": (["\\boxed{\\frac{\\pi}{2} + \\sqrt2}"], ["\\boxed{1.57}"]),
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": (
        ["\\boxed{\n\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}\n}"],
        ["\\boxed{\n\\begin{pmatrix}\n2 \\\\\n1\n\\end{pmatrix}\n}"],
    ),
    "18": (
        ["\\[\n\\boxed{\n18\n}\n\\]\nThe 3 steps are above.", "\\boxed{18}, not \\boxed{17}"],
        ["\\boxed{\n17\n}\nNot 18"],
    ),
    "18 dollars": (["She has 18 dollars.", "\\boxed{18}", "\\boxed{\\$18}"], ["\\boxed{17}", "18 or 19 dollars"]),
    "18\\ \\mathrm{cm}^2": (["The area is 18 square centimetres.", "\\boxed{18}"], ["\\boxed{324}"]),
    "2 pi": (["\\boxed{2\\pi}"], ["\\boxed{2}"]),
    "5:30 \\text{ p.m.}": (
        ["The answer is 5:30 PM.", "They meet at 17:30.", "**5:30** on Monday", "\\boxed{5:30 \\text{ PM}}"],
        ["The answer is 5:30 AM", "\\boxed{5}", "5 PM", "5:30 PM or 6:30 PM", "5:30:20 PM", "5:30 in the morning"],
    ),
    "5:00 PM": (
        ["The answer is 5 p.m.", "17:00", "\\boxed{5}", "It is 5 in the evening.", "**5 o'clock**"],
        ["5:01 PM", "\\boxed{12}", "5 times", "5.30 pm", "-5", "5 hours", "The answer is 5 in the morning"],
    ),
    "5:30 PM": (["5.30 pm", "#### 5.30 p.m."], ["5.3", "5.31 pm"]),
    "0:15": (["12:15 AM", "\\boxed{0:15}"], ["12:15 PM", "12:15"]),
    "12:30": (["The answer is 12:30 PM", "The ratio is $2:5$"], ["The answer is 0:30 PM", "12"]),
    "10 \\text{ AM}": (["\\boxed{10 \\text{ a.m.}}", "\\boxed{10}"], ["\\boxed{10 \\text{ PM}}"]),
    "B": (
        [
            "\\boxed{\\textbf{(B)}\\ 12}",
            "B) 12",
            "The answer is (B) $12$.",
            "Option B",
            "The correct option is B, not C.",
        ],
        ["\\boxed{\\textbf{(C)}\\ 12}", "The answer is B or C", "\\boxed{B+1}"],
    ),
    "(B)": (["\\boxed{B}", "**B. Paris** is one."], ["**C. Brussels**"]),
    "yes": (["**Yes**, because 3 > 2"], ["**No**"]),
}
"""Right answer -> texts that give it, and texts that do not."""


@pytest.mark.parametrize(("name", "right"), [("right", True), ("wrong", False)])
def test_phrasings(name: str, right: bool) -> None:
    texts = [(text, answer) for answer, texts in PHRASINGS[name].items() for text in texts]
    assert [(text, answer, final_answers(text)) for text, answer in texts if is_right(text, answer) is not right] == []


def test_expressions_are_equal_as_math_verify_decides() -> None:
    texts = [
        (answer, text, side == 0) for answer, both in MATHEMATICS.items() for side in (0, 1) for text in both[side]
    ]
    assert [case for case in texts if is_right(case[1], case[0]) is not case[2]] == []


def test_an_expression_without_end_is_wrong_and_the_next_answer_is_judged() -> None:
    began = time.monotonic()
    assert not is_right("#### 9^9^9^9^9", "9") and is_right("#### 9", "9")
    assert time.monotonic() - began < 60 * max(1.0, os.getloadavg()[0])


# Where time grows with the square of the length, one of these takes minutes.
@pytest.mark.parametrize(
    "piece", ["\\boxed{", "\\boxed{42}", "\\[", "$$ ", "(", "**", "1 ", "1,", "1=", "²", "7", " ", "~"]
)
def test_what_a_model_repeats_without_end_is_read_in_time_linear_in_it(piece: str) -> None:
    assert is_right(f"{piece * (100_000 // len(piece))}\nThe answer is 42.", "42")


@pytest.mark.parametrize(
    ("text", "marked"), [("#### 7", True), ("\\boxed{7}", True), ("####", False), ("it is 7", False), ("", False)]
)
def test_is_marked(text: str, marked: bool) -> None:
    assert is_marked(text) is marked


@pytest.mark.parametrize(
    ("right", "equal", "other"),
    [
        ("listen", "\\text{Listen}", "silent"),
        ("\\text{Monday}", "Monday.", "Tuesday"),
        ("foo bar", "Foo bar", "bar foo"),
        ("BADC", "BADC", "ABCD"),
        ("H2O", "H_2O", "HO2"),
        ("2024-01-05", "2024-01-05", "2024-05-01"),
        ("2024-01-05", "2024-01-05", "2018"),
        ("5/4/2024", "5/4/2024", "4/5/2024"),
        ("204_5", "204_{5}", "204_6"),
        ("11_{2}", "11", "11_{3}"),
        ("xyz", "zyx", "xy"),
        ("AB", "BA", "AC"),
        ("2\\pi", "2\\pi", "\\pi"),
    ],
)
def test_words_and_dates_are_no_mathematics(right: str, equal: str, other: str) -> None:
    """math-verify takes letters for a product, and a date for a subtraction: silent was listen, and 2018 a day."""
    assert is_right(f"\\boxed{{{equal}}}", right) and not is_right(f"\\boxed{{{other}}}", right)


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
