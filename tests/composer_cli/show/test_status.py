import json
import re
import shutil

import pytest
from support import blocks
from support.command_line import call, environment, model, until
from support.runs import rewritten

from composer_cli.show import runs
from composer_stages import collect
from composer_stages.layout import age


def reasons(root):
    return {line.run.partition("/")[0]: (line.status, line.reason) for line in runs.lines(root)}


def test_complete_runs_need_no_reason(made):
    lines = runs.lines(made)
    assert all((line.status, line.reason) == ("complete", "") for line in lines)
    assert (lines[0].done, lines[0].planned) == (4, 4)


def test_the_table_is_aligned_and_json_says_the_same(made):
    text = call(made, "status").stdout
    assert [line.index("complete") for line in text.splitlines()[1:]] == [text.index("status")] * 3
    assert [run["status"] for run in json.loads(call(made, "status", "--json").stdout)["runs"]] == ["complete"] * 3


def test_an_empty_artifacts_folder_is_reported(tmp_path):
    done = call(tmp_path / "artifacts", "status")
    assert done.returncode == 0 and "no runs" in done.stderr and not done.stdout


def test_an_input_that_was_changed_damaged_or_deleted_is_the_reason(own_runs):
    """One after the other; a manifest nobody can read does not hide the other runs."""
    run = (own_runs / "collect" / "latest").resolve()
    outputs = json.loads((run / "manifest.json").read_text())["outputs"]
    outputs["steps"]["content_sha256"] = "0" * 64
    rewritten(run / "manifest.json", lambda fields: fields | {"outputs": outputs, "stage_version": 0})
    (run / "steps.parquet").unlink()
    older = f"steps.parquet is missing; collect was version 0 and is now {collect.STAGE.version}"
    assert reasons(own_runs)["collect"] == ("damaged", older)
    assert "has changed since" in reasons(own_runs)["replay-teachers"][1]
    (run / "manifest.json").write_text("{")
    found = reasons(own_runs)
    assert found["collect"][0] == "unreadable" and found["replay-teachers"][0] == "complete"
    assert "is unreadable" in found["replay-teachers"][1]
    shutil.rmtree(run)
    assert "was deleted" in reasons(own_runs)["replay-teachers"][1]


def test_a_run_in_progress_is_read_and_left_alone_and_told_from_one_that_was_killed(server, tmp_path):
    root = tmp_path / "artifacts"
    words = ["collect", *model(server, "slow"), "-s", "tasks=8", "-s", "samples=1", "-s", "in_flight.rollouts=1"]
    process = blocks.start(words, tmp_path, environment(root))
    until(lambda: [p for p in root.glob("collect/2*/steps/*.open") if p.stat().st_size])
    assert reasons(root)["collect"] == ("running", "in progress")
    folder = next(root.glob("collect/2*"))
    before = next(folder.glob("steps/*.open")).read_bytes()
    shown = call(root, "show", folder)
    after = next(folder.glob("steps/*.open")).read_bytes()
    process.kill()
    process.join()
    said = re.search("status  running, in progress: ([0-9]) of 8 rollouts done; --follow watches it\n", shown.stdout)
    assert said and f"\n{said[1]} rollout" in shown.stdout and " failed " in shown.stdout
    assert re.search("began .* [0-9]+ s ago, 1 attempt", shown.stdout) and after[: len(before)] == before
    assert reasons(root)["collect"] == ("running", "its process ended without finishing; --resume goes on")


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (65, "1 min"), (7300, "2 h"), (200000, "2 d")])
def test_ages_are_rough(seconds, text):
    assert age(seconds) == text
