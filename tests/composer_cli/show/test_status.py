import json
import shutil
import subprocess

import pytest
from support.command_line import call, command, environment, model, until
from support.runs import rewritten

from composer_cli.show import runs
from stages import collect
from stages.layout import age


@pytest.fixture
def three(made, tmp_path):
    """A copy of the finished runs, which read each other, to be damaged."""
    root = shutil.copytree(made, tmp_path / "artifacts", symlinks=True)
    for path in root.glob("*/2*/manifest.json"):
        rewritten(path, lambda fields: json.loads(json.dumps(fields).replace(str(made), str(root))))
    return root


def reasons(root):
    return {line.run.partition("/")[0]: (line.status, line.reason) for line in runs.lines(root)}


def edit(folder, **changes):
    """Change fields of a run's manifest."""
    rewritten(folder / "manifest.json", lambda fields: fields | changes)


def test_complete_runs_need_no_reason(made):
    lines = runs.lines(made)
    assert all((line.status, line.reason) == ("complete", "") for line in lines)
    assert (lines[0].done, lines[0].planned) == (4, 4)


def test_the_table_is_aligned_and_json_says_the_same(made):
    text = call(made, "status").stdout
    assert [line.index("complete") for line in text.splitlines()[1:]] == [text.index("status")] * 3
    assert [run["status"] for run in json.loads(call(made, "status", "--json").stdout)["runs"]] == ["complete"] * 3


def test_no_runs_is_said(tmp_path):
    done = call(tmp_path / "artifacts", "status")
    assert done.returncode == 0 and "no runs" in done.stderr and not done.stdout


def test_a_deleted_input_is_the_reason(three):
    shutil.rmtree((three / "collect" / "latest").resolve())
    assert "was deleted" in reasons(three)["replay-teachers"][1]


def test_a_changed_input_is_the_reason(three):
    run = (three / "collect" / "latest").resolve()
    outputs = json.loads((run / "manifest.json").read_text())["outputs"]
    outputs["steps"]["content_sha256"] = "0" * 64
    edit(run, outputs=outputs)
    assert "has changed since" in reasons(three)["replay-teachers"][1]


def test_an_older_version_and_a_missing_file_are_reasons(three):
    run = (three / "collect" / "latest").resolve()
    edit(run, stage_version=0)
    (run / "steps.parquet").unlink()
    assert reasons(three)["collect"] == (
        "damaged",
        f"steps.parquet is missing; collect was version 0 and is now {collect.STAGE.version}",
    )


def test_a_manifest_nobody_can_read_does_not_hide_the_others(three):
    (three / "collect" / "latest" / "manifest.json").write_text("{")
    assert reasons(three)["collect"][0] == "unreadable" and reasons(three)["replay-teachers"][0] == "complete"
    assert "is unreadable" in reasons(three)["replay-teachers"][1]


def test_a_run_in_progress_is_told_from_one_that_was_killed(server, tmp_path):
    root = tmp_path / "artifacts"
    words = ["collect", *model(server, "slow"), "-s", "tasks=2", "-s", "in_flight.rollouts=1"]
    with subprocess.Popen(command(*words), env=environment(root), stderr=subprocess.DEVNULL) as process:
        until(lambda: list(root.glob("collect/2*/manifest.json")))
        assert reasons(root)["collect"] == ("running", "in progress")
        process.kill()
    assert reasons(root)["collect"] == ("running", "its process ended without finishing; --resume goes on")


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (65, "1 min"), (7300, "2 h"), (200000, "2 d")])
def test_ages_are_rough(seconds, text):
    assert age(seconds) == text
