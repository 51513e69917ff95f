"""What was handed in, by the verdict on it."""

from typing import Any

from stages.pairs.groups import compare_submissions


def row(name: str, reward: float | None, model: str = "m") -> dict[str, Any]:
    return {"rollout_id": name, "model": model, "reward": reward, "gt_pass": None if reward is None else reward > 0}


def test_accepted_over_refused_each_distinct_text_once() -> None:
    rows = [row("a", 1.0, "x"), row("b", 1.0, "y"), row("c", 0.0, "z"), row("d", 0.0, "x")]
    found, dropped = compare_submissions(rows, {"a": "P", "b": "P", "c": "Q", "d": "R"}, None)
    assert [(v.preference.chosen, v.preference.rejected, v.preference.votes_chosen) for v in found] == [
        ("P", "Q", 2),
        ("P", "R", 2),
    ]
    assert [v.preference.rejected_by for v in found] == ["z", "x"] and not dropped
    assert [
        v.preference.rejected for v in compare_submissions(rows, {"a": "P", "b": "P", "c": "Q", "d": "R"}, "z")[0]
    ] == ["Q"]


def test_reasons() -> None:
    rows = [row("a", 1.0), row("b", 0.0), row("c", None), row("d", 0.0), row("e", None)]
    found, dropped = compare_submissions(rows, {"a": "P", "b": "P", "c": "Q", "d": " ", "e": None}, None)
    assert found == [] and dropped == {
        "submission_judged_both_ways": 1,
        "submission_not_judged": 1,
        "no_submission": 1,
    }
    assert compare_submissions([row("a", 1.0), row("b", 1.0)], {"a": "P", "b": "Q"}, None)[1] == {
        "submissions_equal": 1
    }
