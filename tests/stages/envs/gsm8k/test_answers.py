"""What counts as the final answer of a text: phrasings that people and math-verify call right, and wrong ones."""

import os
import time

import pytest
from needs import REAL, needs

from composer_stages.envs.gsm8k.answers import final_answers, is_marked, is_right
from composer_stages.envs.task_table import read_rows

pytestmark = needs("math")

RIGHT: dict[str, tuple[str, ...]] = {
    "72": (
        "#### 72",
        "The answer is 72.",
        "So she sold **72** clips.",
        "$$\\boxed{72}$$",
        "#### 72 clips",
        "#### $72.00",
        "#### **72**",
        "#### The answer is 72",
        "#### Final Answer: 72",
        "#### Step 1: April\nShe sold 48.\n#### Step 2: May\nShe sold 24.\n\nThe total is \\boxed{72}.",
        "#### Step 1: April\nShe sold 48.\n#### Step 2: May\nShe sold 24.\n\n**Answer: 72**",
        "#### 48 + 24 = 72",
        "#### 48 + 24",
        "\\boxed{72}\n\n#### 72",
        "#### 1. April\n48 clips\n#### 2. May\n24 clips\n#### 72",
        "**Final Answer**\n\n72",
        "### Final Answer\n\n**72 clips**",
        "Therefore, 72 is the answer.",
        "The final answer is $72$.",
        "Final answer: \\(72\\)",
        "#### 72 (48 in April and 24 in May)",
        "#### 72.\nLet me know if you have questions about step 2.",
        "| April | 48 |\n| May | 24 |\n| **Total** | **72** |",
    ),
    "1200": (
        "#### 1,200",
        "#### $1,200.00",
        "#### 1 200",
        "#### 1'200",
        "\\boxed{1{,}200}",
        "\\boxed{1\\,200}",
        "#### 1_200",
        "The answer is €1,200",
    ),
    "-5": (
        "#### -5",
        "#### −5",
        "#### -$5",
        "\\boxed{-5}",
    ),
    "0.5": (
        "#### 0.50",
        "#### .5",
        "#### 1/2",
    ),
    "18": (
        "<answer>18</answer>",
        "\\boxed{\\text{18 dollars}}",
        "####\n18",
        "x = 18",
        "#### x = 18",
        "12 + 6 = 18, so she makes $18 every day.",
        "\\[\n\\boxed{18}\n\\]",
        "The answer is: **$18**.",
        "**18**",
        "Answer:18",
        "A: 18",
        "He has 18 apples left over.",
        "#### $18$ dollars",
        "#### ≈ 18",
        "3 * 6 = 18",
        "- Total: 18",
        "The answer is 18 (eighteen).",
        "#### +18",
        "I think it's 20? No: the answer is 18.",
        "\\boxed{20}\n\nWait, that is wrong. I forgot two.\n\n\\boxed{18}",
        "The answer is 18\n\nThe answer is 18",
        "#### \\boxed{18}",
        "**#### 18**",
        "#### Answer: $\\boxed{18}$",
        "18\n####",
        "Answer: 18 USD",
        "#### USD 18",
        "#### Rs. 18",
        "The final answer is **18 dollars**.",
        "Total = 18",
        "She has $18.",
        "**The answer is: 18**",
        "The answer: 18",
        "`18`",
        "#### `18`",
        "The answer is $\\mathbf{18}$",
        "$18$",
        "18 eggs/day",
        "\\boxed{18 \\text{ eggs}}",
        "\\boxed{\\$18}",
        "\\boxed{18.00}",
        "\\boxed{x=18}",
        "# Answer\n18",
        "## Answer: 18",
    ),
    "1200000": (
        "#### 1.200.000",
        "#### 1.2 million",
    ),
    "100000": ("#### 1,00,000",),
    "1000": (
        "#### 10^3",
        "#### 10³",
        "#### 1e3",
        "$\\boxed{1\\times10^3}$",
    ),
    "0.001": (
        "#### 10^{-3}",
        "1.0 × 10⁻³",
    ),
    "2.5": (
        "#### 2 1/2",
        "#### 2½",
        "\\boxed{2\\frac{1}{2}}",
    ),
    "0.75": (
        "\\boxed{\\frac{3}{4}}",
        "\\boxed{\\dfrac34}",
        "#### 75%",
        "The result is $\\frac{3}{4}$.",
        "So it is \\(\\dfrac{3}{4}\\) of a cup.",
    ),
    "75": (
        "#### 75%",
        "\\boxed{75\\%}",
    ),
    "3": ("#### 3:00",),
    "5": (
        "5 m²",
        "#### 5 m^2",
        "Final Answer: 5.0 hours",
    ),
    "60": ("#### 60 km/h",),
    "20": ("The answer is 20 hours",),
    "1234.5": ("#### 1.234,50",),
    "0": ("#### 0",),
    "64": ("\\boxed{8^2}",),
    "8": ("\\boxed{\\sqrt{64}}",),
    "10": ("Thus 10 of the 12 remain, so the answer is 10 of them.",),
    "12": ("Answer: 12 apples.",),
    "1.5": ("#### $1\\frac12$ cups",),
    "2125": ("#### 2,125 total",),
    "1000000": ("#### 1 million",),
    "25": (
        "The answer is 25 percent.",
        "#### 25 %",
    ),
}
"""Right answer -> texts that give it."""
WRONG: dict[str, tuple[str, ...]] = {
    "18": (
        "The answer is 18.\nThe answer is 20.",
        "#### 18\n#### 20",
        "between 18 and 20",
        "\\boxed{18, 20}",
        "\\boxed{18}, \\boxed{20}",
        "#### 18 and 20",
        "#### not 18",
        "#### 180",
        "#### 1 8",
        "#### 18k",
        "\\boxed{}",
        "The answer is 18,000",
        "#### 18/2",
        "#### 18^2",
        "#### eighteen",
        "#### 18 or 19",
        "The answer is 18 or 19.",
        "\\boxed{18} or \\boxed{19}",
        "#### 18, 19",
        "#### 19, 18",
        "no",
        "",
        "####",
        "#### ",
        "18 people asked; the answer is 20.",
        "\\boxed{81}",
        "#### 180",
        "#### 18.5",
        "#### 1.8",
        "The answer is not known.",
        "#### 17.9999",
        "19 is the answer, not 18",
    ),
    "20": (
        "#### 18\n#### 20",
        "The answer is 18 and not 20? I say \\boxed{18}",
    ),
    "0.75": ("$\\frac{4}{3}$",),
    "3": (
        "$\\frac{3}{4}$",
        "#### 12 apples and 3 pears",
        "#### 3:30",
        "#### 10^3",
        "\\boxed{3.5}",
        "\\boxed{\\frac{3}{4}}",
    ),
    "4": (
        "$\\frac{3}{4}$",
        "\\boxed{\\frac{3}{4}}",
    ),
    "5": (
        "Step 5",
        "#### -5",
        "\\boxed{5}\n\n#### 72",
        "#### 5-6",
        "#### 5 to 6",
        "#### 5,6",
    ),
    "9": (
        "1,2,3,4,5,6,7,8,9",
        "#### 18/2/1/2",
    ),
    "0": ("#### -",),
    "72": (
        "#### 71",
        "\\boxed{5}\n\n#### 72",
        "72 was my first guess.\n#### 48",
        "<answer>71</answer>",
    ),
    "1": (
        "#### 1/2",
        "#### 1,200",
        "#### 2 1/2",
        "#### 1. April\nShe sold 48\nShe sold 24",
    ),
    "19": ("#### 18 or 19",),
    "12": (
        "#### 12 apples and 3 pears",
        "#### 1.2",
    ),
    "2": (
        "#### Step 1: x\n3\n#### Step 2: May\nshe has \\boxed{4}",
        "#### 2 1/2",
        "#### 5 m^2",
        "#### 5 m²",
        "9^9^9^9^9",
    ),
    "200": ("#### 1,200",),
    "120": ("#### 12.0",),
    "10": ("#### 10^3",),
    "0.33": ("#### 1/3",),
    "7": ("#### 0.7",),
    "70": ("#### 7%",),
    "48": ("#### 48 + 24 = 72",),
    "24": ("#### 48 + 24 = 72",),
    "1000": ("#### 1e4",),
    "6": ("#### 5-6",),
    "-18": ("#### 18",),
    "1200": ("#### 1.200",),
    "100": ("#### 100 thousand",),
    "50": ("#### 50/100",),
}
"""Right answer -> texts that do not give it, or give several."""
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


@pytest.mark.parametrize(("table", "right"), [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
def test_phrasings(table: dict[str, tuple[str, ...]], right: bool) -> None:
    texts = [(text, answer) for answer, texts in table.items() for text in texts]
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
