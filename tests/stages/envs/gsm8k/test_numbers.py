from decimal import Decimal

import pytest
from needs import REAL, needs

from stages.envs.gsm8k.env import answer_number, is_marked
from stages.envs.task_table import read_rows

RECORDED = REAL / "multi-answers" / "gsm8k_example_model_solutions.800.jsonl.gz"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("#### $1,200.00", "1200"),
        ("#### 5 eggs of 12", "5"),
        ("#### 1\nno\n#### 2\nsee 3", "2"),
        ("so \\boxed{18}. #### 17", "17"),
        ("#### none\nit is 4", "4"),
        ("1 and \\boxed{2} and \\boxed{\\$1{,}234} of 9", "1234"),
        ("\\boxed{18\\%} of 9", "18"),
        ("\\boxed{} 7", "7"),
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("The answer is 1,000,000.", "1000000"),
        ("1, 2, 3", "3"),
        ("16-3=13-5", "5"),
        ("it is -5", "-5"),
        ("it is \N{MINUS SIGN}5", "-5"),
        ("x=-$.50", "-0.5"),
        ("7.", "7"),
        ("3.50", "3.5"),
        ("A: 3.0", "3"),
        ("12,34", "34"),
        ("\u0663", None),
        ("no number", None),
        ("", None),
        ("####", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert answer_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "marked"), [("#### 7", True), ("\\boxed{7}", True), ("####", False), ("it is 7", False), ("", False)]
)
def test_marked(text: str, marked: bool) -> None:
    assert is_marked(text) is marked


@needs("real")
def test_recorded_verdicts_on_the_solutions_of_four_models() -> None:
    rows = read_rows(RECORDED)
    found = [
        (answer_number(answer["solution"]) == answer_number(row["ground_truth"]), answer["is_correct"])
        for row in rows
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(found) == 3200 and all(ours is recorded for ours, recorded in found)
