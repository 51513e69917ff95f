"""curriculum: pass rates with their intervals from runs of collect, and the tasks of a band of them in order."""

from pathlib import Path

import pytest
from scipy.stats import binomtest
from support.curricula import ids, make, measured
from support.runs import written

from stages import curriculum
from stages.envs.base import TWIN
from stages.envs.config import EnvConfig
from stages.errors import BadInput, Incomplete
from stages.runs.artifact import Run
from stages.runs.records import DIFFICULTY, ROLLOUT, TASK

PASSED: dict[str, list[bool | None]] = {
    "always": [True] * 8,
    "half": [True, False] * 4,
    f"half{TWIN}": [True] * 8,
    "hardly-known": [True, False, None, None],
    "mostly": [True] * 7 + [False],
    "never": [False] * 8,
    "rarely": [True, *[False] * 7],
    "unknown": [None] * 4,
}
"""Rollouts by task: solved, not solved, not graded."""


def test_rates_stand_with_their_number_and_wilsons_interval(tmp_path: Path) -> None:
    rows = {row["task_id"]: row for row in make(tmp_path, measured(tmp_path, PASSED)).rows(DIFFICULTY)}
    assert list(rows) == list(PASSED)
    for task, passed in PASSED.items():
        graded = [one for one in passed if one is not None]
        row = rows[task]
        assert (row["num_rollouts"], row["num_solved"]) == (len(graded), sum(graded))
        if not graded:
            assert (row["rate"], row["low"], row["high"]) == (None, None, None)
            continue
        interval = binomtest(sum(graded), len(graded)).proportion_ci(method="wilson")
        assert row["rate"] == sum(graded) / len(graded)
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_tasks_of_a_band_come_in_order(tmp_path: Path) -> None:
    run = measured(tmp_path, PASSED)
    everything = make(tmp_path, run)
    assert ids(everything) == ["always", "mostly", "half", "rarely", "never"]
    assert ids(make(tmp_path, run, order="hard-first")) == ["never", "rarely", "half", "mostly", "always"]
    band = make(tmp_path, run, min_rate=0.125, max_rate=0.875, min_rollouts=2)
    assert ids(band) == ["mostly", "half", "hardly-known", "rarely"], "the ends of the band belong to it"
    places = {row["task_id"]: row["place"] for row in band.rows(DIFFICULTY)}
    assert [places[name] for name in ids(band)] == [0, 1, 2, 3] and places["always"] is None


def test_the_report_says_what_was_left_out_and_why(tmp_path: Path) -> None:
    run = make(tmp_path, measured(tmp_path, PASSED), min_rate=0.1, max_rate=0.9)
    report = (run.path / "report.txt").read_text()
    assert report.startswith("3 of 8 tasks, by 50 graded rollouts of m\n")
    for line in (
        "2  left out, fewer than 4 graded rollouts",
        "1  left out, solved by less than 10 %",
        "1  left out, solved by more than 90 %",
        "1  left out, impossible variants, whose passes are hacks",
        "6  rollouts that could not be graded and count for nothing",
        "2  tasks solved by all",
        "1  tasks solved by none",
        "1  tasks solved by less than all",
    ):
        assert f"     {line}\n" in report, line
    assert run.manifest.counts["left out, solved by less than 10 %"] == 1 and run.manifest.counts["ungraded"] == 6


def test_several_runs_add_up_and_one_given_twice_counts_once(tmp_path: Path) -> None:
    one = measured(tmp_path, {"half": [True, True]})
    other = measured(tmp_path, {"half": [False, False, False], "never": [False] * 4}, model="n")
    run = make(tmp_path, one, other, Run(one.path))
    rows = {row["task_id"]: row for row in run.rows(DIFFICULTY)}
    assert (rows["half"]["num_solved"], rows["half"]["num_rollouts"]) == (2, 5)
    assert "Several models played" in (run.path / "report.txt").read_text()


def test_another_task_under_the_same_id_is_refused(tmp_path: Path) -> None:
    one, other = (measured(tmp_path / p, {"half": [True]}, prompt=p) for p in ("do it", "do something else"))
    with pytest.raises(BadInput, match="another task under the id half"):
        make(tmp_path, one, other)


def test_rollouts_without_their_task_are_refused(tmp_path: Path) -> None:
    run = Run(
        written(
            tmp_path, "collect/x", [(TASK, []), (ROLLOUT, [{"rollout_id": "a#0", "task_id": "a", "gt_pass": True}])]
        )
    )
    with pytest.raises(BadInput, match="has rollouts of a, which no run given has as a task"):
        make(tmp_path, run)


def test_an_empty_band_and_an_impossible_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match=r"None of 1 tasks lies between 0\.1 and 1"):
        make(tmp_path, measured(tmp_path, {"never": [False] * 4}), min_rate=0.1)
    with pytest.raises(ValueError, match=r"min_rate is 0\.5, above max_rate"):
        curriculum.Config(min_rate=0.5, max_rate=0.4)


def test_a_curriculum_counts_by_its_tasks_and_not_by_its_place(tmp_path: Path) -> None:
    one = make(tmp_path / "a", measured(tmp_path / "a", PASSED))
    same = make(tmp_path / "b", measured(tmp_path / "b", PASSED))
    other = make(tmp_path / "c", measured(tmp_path / "c", PASSED), order="hard-first")
    first, second, third = (EnvConfig(curriculum=str(run.path)).identity() for run in (one, same, other))
    assert first == second != third and "curriculum" not in EnvConfig().identity()


def test_equal_measurements_give_equal_content(tmp_path: Path) -> None:
    one, same = (make(tmp_path / p, measured(tmp_path / p, PASSED)) for p in "ab")
    assert one.manifest.content == same.manifest.content
