from pathlib import Path

import pytest
from support.command_line import call

from composer_cli.show import runs
from stages.errors import BadInput, UsageError


def test_all_runs_are_found_in_the_order_of_the_pipeline(made: Path):
    assert [folder.parent.name for folder in runs.folders(made)] == ["collect", "replay-teachers", "extract-pairs"]


def test_a_run_is_found_by_folder_name_part_and_stage(made: Path):
    run = (made / "collect" / "latest").resolve()
    for text in (
        str(run),
        run.name,
        f"collect/{run.name}",
        run.name[-6:],
        "collect",
        str(made / "collect"),
        str(made / "collect" / "latest"),
    ):
        assert runs.find(made, text).resolve() == run, text


def test_what_is_no_run_or_several_is_said(made: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="no run 'zebra'"):
        runs.find(made, "zebra")
    with pytest.raises(UsageError, match="3 runs fit"):
        runs.find(made, "2")
    assert "no manifest.json" in call(made, "show", tmp_path).stderr


def test_without_from_the_latest_runs_that_fit_are_taken_and_told(made: Path):
    told: list[str] = []
    found = runs.choose("extract-pairs", [], made, told.append)
    assert {name: found.one(name).manifest.stage for name in found} == {
        "rollouts": "collect",
        "teacher_actions": "replay-teachers",
    }
    assert len(told) == 2 and all("latest" in line for line in told)


def test_optional_inputs_are_not_taken_unasked(made: Path):
    assert runs.choose("train", [], made, print) == {}
