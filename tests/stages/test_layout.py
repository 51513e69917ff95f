"""Tables are aligned by the width of their characters, numbers to the right; long lines are folded, names shortened."""

import io
from contextlib import redirect_stdout

import pytest

from composer_cli.printing import fit_to_terminal
from composer_stages.layout import (
    LEFT,
    RIGHT,
    aligned,
    counted,
    folded,
    signed,
    singular,
    width,
    without_middle,
    without_shared_start,
)


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_report_is_refolded_for_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    sentence = " ".join(["words"] * 30)
    folds = {  # of each part, in a terminal of 60 columns
        "one": "one",
        folded(sentence, 100): folded(sentence, 60),
        "": "",
        "  " + "x " * 47 + "end": "  " + "x " * 28 + "x\n  " + "x " * 18 + "end",
        "also": "also",
        f"{'name':<50}  1.5 %  20 %": f"{'name':<50}  1.5 %\n    20 %",
        "/a/path-of-more" + "x" * 60: "/a/path-of-more" + "x" * 60,
    }
    report = "\n".join(folds)
    with redirect_stdout(Terminal()):
        assert fit_to_terminal(report) == "\n".join(folds.values())
    assert fit_to_terminal(report) == report, "no terminal"


def test_a_command_stays_on_one_line_and_wide_characters_count_twice() -> None:
    command = "`composer show collect a-long-id-of-a-rollout`"
    told = f"{command} prints it; ({command}) too, and more words that fill the line up to its end."
    for most in (40, 60, 100):
        lines = folded(told, most).split("\n")
        assert sum(command in line for line in lines) == 2 and " ".join(lines) == told
        assert all(len(line) <= most or line.strip("();, ") == command for line in lines)
    assert folded("修复这个错误 now，全部", 9).split("\n") == ["修复这个", "错误 now", "，全部"]
    rows = "  ".join(["修复", *("cell" for _ in range(5))])
    with redirect_stdout(Terminal()):
        assert fit_to_terminal(folded(told, 100)) == folded(told, 80), "a report is folded at 100 first"
    assert max(map(width, folded(rows, 20).split("\n"))) <= 20


def test_shared_starts_of_names_are_elided() -> None:
    assert [without_middle("abcdefgh", most) for most in (8, 5)] == ["abcdefgh", "ab\u2026gh"]
    ids = [f"a/benchmark-of-a-long-name/{end}" for end in ("10x", "11x", "")]
    assert without_shared_start([*ids, ""]) == ["\u202610x", "\u202611x", "\u2026", ""]
    assert without_shared_start(ids[:1]) == ids[:1] and without_shared_start(["ab-1", "ab-2"]) == ["ab-1", "ab-2"]


def test_aligned_places_numbers_right_and_counts_wide_characters() -> None:
    assert aligned([("修复", 5), ("ae\u0301", 10)], ("task", "n")) == "task   n\n修复   5\nae\u0301    10"
    assert aligned([("1", "a"), ("10", "b")], ("x", "y"), (RIGHT, LEFT)) == " x  y\n 1  a\n10  b"
    assert aligned([], ("a", "b")) == "a  b" and aligned([]) == "", "without rows the head alone is left"


def test_counted_uses_the_plural() -> None:
    assert [counted(number, "family") for number in (0, 1, 1200)] == ["0 families", "1 family", "1,200 families"]
    nouns = {"rollouts": "rollout", "runs of rollouts": "run of rollouts", "table": "table"}
    assert {noun: singular(noun) for noun in nouns} == nouns


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.042, "+4.2"), (-0.0002, "-0.02"), (0.0004, "+0.04"), (0.0005, "+0.1"), (0.0, "+0.0"), (-2e-18, "+0.0")],
)
def test_a_small_difference_keeps_its_sign(share: float, shown: str) -> None:
    """An interval that ends just below 0 was printed as "+0.0", beside the word worse."""
    assert signed(share) == shown
