"""`composer import swe-logs FOLDER`: a rollout for every log with a verdict, the others by name, and our agreement."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.errors import BadInput
from stages.formats import swebench
from stages.import_traces import Config
from stages.runs import runner
from stages.runs.kinds import ORIGIN, ROLLOUT
from stages.runs.run import Run

ROW = {"repo": "pallets/flask", "FAIL_TO_PASS": '["t.py::test_new"]', "PASS_TO_PASS": '["t.py::test_old"]'}
MARKED = ">>>>> Start Test Output\n{}>>>>> End Test Output\n"
STATUS = {
    "FAIL_TO_PASS": {"success": ["t.py::test_new"], "failure": []},
    "PASS_TO_PASS": {"success": [], "failure": ["t.py::test_old"]},
}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A resolved instance, one that is not, one whose report is wrong, and one without a log."""
    folder = tmp_path / "logs"
    good, bad = "PASSED t.py::test_new\nPASSED t.py::test_old\n", "FAILED t.py::test_new - no\n"
    for number, (results, said) in enumerate([(good, True), (bad, False), (bad, True), (None, None)], 1):
        place = folder / f"pallets__flask-{number}"
        place.mkdir(parents=True)
        (place / "run_instance.log").write_text("started\n")
        (place / "patch.diff").write_text(f"diff {number} ghp_{'a' * 36}\n")
        if results is not None:
            report = {"resolved": said, "model_name_or_path": "m", "tests_status": STATUS if said else None}
            (place / "report.json").write_text(json.dumps({place.name: report}))
            (place / "test_output.txt").write_text(MARKED.format(results))
    rows = [{**ROW, "instance_id": f"pallets__flask-{number}"} for number in range(1, 5)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return folder


def imported(root: Path, *words: Path | str) -> Run:
    config = Config.model_validate({"paths": [str(word) for word in words]})
    return Run(runner.execute("import", {}, config, root=root / "artifacts").path)


def document(run: Run, name: str) -> Any:
    return json.loads(run.read_file(name) or b"null")


def test_every_log_becomes_a_rollout_or_a_named_drop(tmp_path: Path, logs: Path) -> None:
    run = imported(tmp_path, "swe-logs", logs, tmp_path / "rows.json")
    rollouts = run.rows(ROLLOUT)
    assert [(r["task_id"], r["reward"], r["hidden_pass"], r["family"], r["model"]) for r in rollouts] == [
        ("pallets__flask-1", 1.0, True, "pallets/flask", "m"),
        ("pallets__flask-2", 0.0, False, "pallets/flask", "m"),
        ("pallets__flask-3", 0.0, False, "pallets/flask", "m"),
    ]
    (drop,) = document(run, "drops.json")
    assert drop["reason"] == "ungraded_log" and drop["detail"].startswith(
        "pallets__flask-4: incomplete: no test output"
    )
    assert run.rows(ORIGIN)[0]["submission"] == "diff 1 [redacted: github-token]\n"


def test_the_report_says_how_far_we_agree_and_a_document_holds_every_test(tmp_path: Path, logs: Path) -> None:
    run = imported(tmp_path, "swe-logs", logs, tmp_path / "rows.json")
    text = (run.read_file("report.txt") or b"").decode()
    assert "4 logs: 1 resolved, 2 not, 1 without a verdict" in text and "1 disagree, 1 not compared" in text
    assert "disagrees: pallets__flask-3/test_output.txt: False here, True there" in text
    assert "FAIL" not in text.partition("Collection checks")[2], (
        "rollouts without steps are not recorded, and do not fail"
    )
    graded = document(run, "graded.json")
    assert [(one["resolved"], one["agrees"], one["tests_agree"]) for one in graded] == [
        (True, True, False),
        (False, True, None),
        (False, False, False),
        (None, None, None),
    ]
    assert graded[1]["tests_status"]["FAIL_TO_PASS"] == {"success": [], "failure": ["t.py::test_new"]}


def test_what_a_verdict_depends_on_makes_it_new_work(tmp_path: Path, logs: Path) -> None:
    words = {"paths": ["swe-logs", str(logs), str(tmp_path / "rows.json")]}
    before = Config.model_validate(words).identity()
    assert Config.model_validate(words).identity() == before
    (tmp_path / "rows.json").write_text((tmp_path / "rows.json").read_text().replace("test_old", "test_older"))
    assert Config.model_validate(words).identity() != before


def test_a_folder_without_logs_is_refused(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(BadInput, match="holds no logs"):
        swebench.find_logs([str(_empty(tmp_path))])
    with pytest.raises(BadInput, match="is a file"):
        swebench.find_logs([str(tmp_path / "rows.json")])


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"
