"""Saved logs of SWE-bench: graded again, compared with the harness, called incomplete, and imported as rollouts."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs
from support.transcripts import document, imported, jsonl

from composer_stages.errors import BadInput
from composer_stages.formats import swebench
from composer_stages.formats.swebench_logs import HARNESS, GradedLog, find_logs, grade_log
from composer_stages.import_traces import Config
from composer_stages.runs.kinds import ORIGIN, ROLLOUT
from composer_stages.runs.run import Run

ROW = {
    "repo": "pallets/flask",
    "instance_id": "pallets__flask-1",
    "FAIL_TO_PASS": '["t.py::test_new"]',
    "PASS_TO_PASS": '["t.py::test_old", "t.py::test_skipped"]',
}
GOOD = "PASSED t.py::test_new\nPASSED t.py::test_old\nSKIPPED t.py::test_skipped\n"
BAD = "PASSED t.py::test_new\nFAILED t.py::test_old - boom\n"


def grade_logs(folder: Path, instance_paths: Sequence[Path] = ()) -> list[GradedLog]:
    return [grade_log(log) for log in find_logs(folder, instance_paths)]


CRASHED, NO_RESULT = "ImportError while loading conftest\n", "the tests ended without a single result"
START, END = "+ : '>>>>> Start Test Output'\n", "+ : '>>>>> End Test Output'\n"
STATUS = {
    "FAIL_TO_PASS": {"success": ["t.py::test_new"], "failure": []},
    "PASS_TO_PASS": {"success": [], "failure": ["t.py::test_old"]},
}


def container(
    folder: Path,
    results: str | None,
    *,
    harness_verdict: bool | None = None,
    marks: bool = True,
    number: int = 1,
    before: str = "PASSED t.py::test_elsewhere\n",
    **report: Any,
) -> Path:
    """One instance's folder as the harness in containers leaves it."""
    name = f"pallets__flask-{number}"
    path = folder / "run" / name
    path.mkdir(parents=True)
    with (folder / "instances.jsonl").open("a") as rows:
        rows.write(json.dumps({**ROW, "instance_id": name}) + "\n")
    (path / "patch.diff").write_text("diff --git a/x b/x\n")
    (path / "run_instance.log").write_text("started\n")
    if results is not None:
        (path / "test_output.txt").write_text(before + (f"{START}{results}{END}" if marks else results))
    if harness_verdict is not None:
        document(path / "report.json", {name: {"resolved": harness_verdict, "model_name_or_path": "m", **report}})
    return folder


def plain(folder: Path, text: str, resolved: list[str], name: str = "pallets__flask-1.some.model") -> Path:
    """One log and the list of its run, as the harness of early 2024 leaves them."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.eval.log.gz").write_bytes(gzip.compress(text.encode()))
    document(folder / "report.json", {"resolved": resolved})
    jsonl(folder / "rows.jsonl", ROW)
    return folder


APPLIED = "PASSED t.py::test_new\n>>>>> Applied Patch (pred)\n>>>>> Applied Patch (test)\n"


@pytest.mark.parametrize(
    ("results", "resolved", "problem"),
    [
        (GOOD, True, None),
        (BAD, False, None),
        ("", False, None),
        (f"{GOOD}>>>>> Patch Apply Failed\n", False, ">>>>> Patch Apply Failed"),
        (f"{GOOD}>>>>> Tests Timed Out after 1800 seconds\n", False, ">>>>> Tests Timed Out"),
    ],
)
def test_a_container_log_is_graded_by_its_results(
    results: str, resolved: bool, problem: str | None, tmp_path: Path
) -> None:
    (log,) = grade_logs(container(tmp_path, results, harness_verdict=resolved))
    assert (log.resolved, log.agrees) == (resolved, True) and (problem or "") in str(log.problem)
    assert (log.eval_log.model, log.eval_log.patch) == ("m", "diff --git a/x b/x\n")


@pytest.mark.parametrize(
    ("folder", "model"),
    [("logs/run_evaluation/a_run/org__model", "org/model"), ("20240620_agent/logs", "20240620_agent"), ("x/y", None)],
)
def test_the_model_of_a_container_log_is_known_by_its_folders(folder: str, model: str | None, tmp_path: Path) -> None:
    path = container(tmp_path, GOOD) / "run/pallets__flask-1"
    (tmp_path / folder).mkdir(parents=True)
    path.rename(tmp_path / folder / path.name)
    assert [log.eval_log.model for log in grade_logs(tmp_path)] == [model]


def test_disagreement_with_a_report_is_found(tmp_path: Path) -> None:
    folder = container(tmp_path, BAD, harness_verdict=True)
    (log,) = grade_logs(folder)
    assert log.agrees is False and log.tests_agree is None
    record = log.record()
    assert (record["file"], record["resolved"], record["said"]) == ("run/pallets__flask-1/test_output.txt", False, True)
    report = {"pallets__flask-1": {"resolved": False, "tests_status": STATUS}}
    document(folder / "run/pallets__flask-1/report.json", report)
    assert [(log.agrees, log.tests_agree) for log in grade_logs(folder)] == [(True, False)]


def test_an_incomplete_log_is_named(tmp_path: Path) -> None:
    (log,) = grade_logs(container(tmp_path / "a", None))
    assert log.resolved is None and log.grader is None and "incomplete: no test output" in str(log.problem)
    (log,) = grade_logs(container(tmp_path / "b", GOOD, marks=False))
    assert log.resolved is None and "no complete test output" in str(log.problem)
    path = container(tmp_path / "c", None) / "run/pallets__flask-1"
    (path / "run_instance.log").write_text(">>>>> Patch Apply Failed:\n")
    (log,) = grade_logs(tmp_path / "c")
    assert log.resolved is None and "run_instance.log says '>>>>> Patch Apply Failed'" in str(log.problem)


def test_a_report_without_a_log_keeps_the_harness_verdict(tmp_path: Path) -> None:
    (log,) = grade_logs(container(tmp_path, None, harness_verdict=True))
    assert (log.resolved, log.agrees, log.grader) == (True, None, HARNESS)


def test_a_carriage_return_ends_a_line_as_it_does_for_the_harness(tmp_path: Path) -> None:
    results = "downloading 3%\rPASSED t.py::test_new\r\nPASSED t.py::test_old\nSKIPPED t.py::test_skipped\n"
    path = container(tmp_path, "", harness_verdict=True) / "run/pallets__flask-1/test_output.txt"
    path.write_bytes(f">>>>> Start Test Output\n{results}>>>>> End Test Output\n\xff".encode("latin-1"))
    assert [log.agrees for log in grade_logs(tmp_path)] == [True]


def test_torn_and_foreign_files_around_a_log_are_ignored(tmp_path: Path) -> None:
    folder = container(tmp_path / "logs", GOOD)
    for path, text in {
        "run/pallets__flask-1/report.json": '{"pallets__fl',
        "run/preds.json": "[1, 2",
        "run/notes.jsonl": "no JSON",
        "../swe-torn.jsonl": '{"instance_id',
        "../swe-torn.parquet": "no table",
    }.items():
        (folder / path).write_text(text)
    (log,) = grade_logs(folder)
    assert (log.eval_log.instance, log.resolved, log.agrees) == ("pallets__flask-1", True, None)


def test_the_folder_of_one_instance_can_be_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = container(tmp_path, GOOD) / "run/pallets__flask-1"
    monkeypatch.chdir(path)
    for folder in (path, Path(".")):
        (log,) = grade_logs(folder)
        assert (log.eval_log.instance, log.resolved, log.eval_log.file) == ("pallets__flask-1", True, "test_output.txt")


@pytest.mark.parametrize("exit_mark", ["All Tests Passed", "Some Tests Failed"])
def test_the_exit_marker_of_an_early_log_is_not_the_grade(exit_mark: str, tmp_path: Path) -> None:
    (good,) = grade_logs(plain(tmp_path / "a", f"{APPLIED}{GOOD}>>>>> {exit_mark}\n", ["pallets__flask-1"]))
    (bad,) = grade_logs(plain(tmp_path / "b", f"{APPLIED}{BAD}>>>>> {exit_mark}\n", []))
    assert (good.resolved, good.agrees, bad.resolved, bad.agrees) == (True, True, False, True)
    assert good.eval_log.model == "some.model"
    crashed = f">>>>> Applied Patch (pred)\n>>>>> Applied Patch (test)\n{CRASHED}>>>>> {exit_mark}\n"
    folder = plain(tmp_path / "c", crashed, [])
    (ended,) = grade_logs(folder)
    assert (ended.resolved, ended.grader, ended.agrees, ended.problem) == (False, "composer", True, NO_RESULT)
    (folder / "report.json").unlink()
    assert [log.resolved for log in grade_logs(folder)] == [False]


@pytest.mark.parametrize(
    ("text", "verdict", "problem"),
    [
        (">>>>> Applied Patch (test)\n", (True, None, HARNESS), "incomplete"),
        (f">>>>> Applied Patch (test)\n{CRASHED}", (True, None, HARNESS), "incomplete"),
        (">>>>> Patch Apply Failed\n", (False, False, "composer"), ">>>>> Patch Apply Failed"),
    ],
)
def test_an_early_log_without_results_gets_the_verdict_of_its_run_unless_its_patch_failed(
    text: str, verdict: tuple[bool, bool | None, str], problem: str, tmp_path: Path
) -> None:
    (log,) = grade_logs(plain(tmp_path, text, ["pallets__flask-1"]))
    assert (log.resolved, log.agrees, log.grader) == verdict and problem in str(log.problem)


@pytest.mark.parametrize("said", [None, False])
def test_a_container_log_without_results_is_unresolved(said: bool | None, tmp_path: Path) -> None:
    (log,) = grade_logs(container(tmp_path, CRASHED, harness_verdict=said, before=""))
    assert (log.resolved, log.problem) == (False, NO_RESULT)


def test_a_damaged_archive_is_incomplete(tmp_path: Path) -> None:
    folder = plain(tmp_path, APPLIED + GOOD + "x" * 9999, ["pallets__flask-1"])
    (path,) = folder.glob("*.gz")
    path.write_bytes(path.read_bytes()[:-12])
    (log,) = grade_logs(folder)
    assert log.grader == HARNESS and "the archive is damaged" in str(log.problem)


def test_an_unknown_instance_is_graded_with_a_file_of_instances(tmp_path: Path) -> None:
    folder = plain(tmp_path / "logs", APPLIED + GOOD, [], name="pallets__flask-2.m")
    (log,) = grade_logs(folder)
    assert (log.resolved, log.agrees, log.grader) == (False, None, HARNESS)
    assert "name a file of instances after the folder" in str(log.problem)
    more = jsonl(tmp_path / "more.jsonl", ROW | {"instance_id": "pallets__flask-2"})
    (log,) = grade_logs(folder, [more])
    assert log.resolved is True and log.agrees is False
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(BadInput, match=r"torn\.jsonl"):
        grade_logs(folder, [tmp_path / "torn.jsonl"])


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    for find in (grade_logs, lambda folder: swebench.find_logs([str(folder)])):
        with pytest.raises(BadInput, match="holds no logs"):
            find(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        grade_logs(tmp_path / "missing")
    (tmp_path / "rows.json").touch()
    with pytest.raises(BadInput, match="is a file"):
        swebench.find_logs([str(tmp_path / "rows.json")])


@needs("real")
def test_grades_agree_with_three_harnesses() -> None:
    docker, early, smith = (
        [log for log in grade_logs(REAL / "swe-logs") if log.eval_log.file.startswith(f"{name}/")]
        for name in ("docker-harness", "log-harness", "swe-smith")
    )
    assert Counter((log.agrees, log.tests_agree) for log in docker) == {(True, True): 16, (None, None): 1}
    assert [log.eval_log.instance for log in docker if log.resolved is None] == ["pydata__xarray-6992"]
    assert len(early) == 46 and all(log.resolved == log.eval_log.harness_resolved for log in early)
    assert [log.eval_log.instance for log in early if log.agrees is None] == ["psf__requests-2317"]
    assert [log.tests_agree for log in smith] == [True] * 4, "to the single test"


# `composer import swe-logs FOLDER`: a rollout for every log with a verdict, the others by name.


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A resolved instance, one that is not, one whose report is wrong, and one without a log."""
    folder, bad = tmp_path / "logs", "FAILED t.py::test_new - no\n"
    for number, (results, harness_verdict) in enumerate([(GOOD, True), (bad, False), (bad, True), (None, None)], 1):
        status = STATUS if harness_verdict else None
        container(folder, results, harness_verdict=harness_verdict, number=number, before="", tests_status=status)
    (folder / "run/pallets__flask-1/patch.diff").write_text(f"diff 1 ghp_{'a' * 36}\n")
    (folder / "instances.jsonl").rename(tmp_path / "rows.jsonl")
    return folder / "run"


def document_of(run: Run, name: str) -> Any:
    return json.loads(run.read_file(name) or b"null")


def test_every_log_becomes_a_rollout_or_a_drop(tmp_path: Path, logs: Path) -> None:
    run = imported(tmp_path, "swe-logs", logs, tmp_path / "rows.jsonl")
    rollouts = run.rows(ROLLOUT)
    assert [(r["task_id"], r["reward"], r["hidden_pass"], r["family"], r["model"]) for r in rollouts] == [
        ("pallets__flask-1", 1.0, True, "pallets/flask", "m"),
        ("pallets__flask-2", 0.0, False, "pallets/flask", "m"),
        ("pallets__flask-3", 0.0, False, "pallets/flask", "m"),
    ]
    (drop,) = document_of(run, "drops.json")
    assert drop["reason"] == "ungraded_log" and drop["detail"].startswith("pallets__flask-4: incomplete")
    assert run.rows(ORIGIN)[0]["submission"] == "diff 1 [redacted: github-token]\n"


def test_the_report_counts_agreement_and_a_document_has_every_test(tmp_path: Path, logs: Path) -> None:
    run = imported(tmp_path, "swe-logs", logs, tmp_path / "rows.jsonl")
    text = (run.read_file("report.txt") or b"").decode()
    assert "4 logs: 1 resolved, 2 not, 1 without a verdict" in text and "1 disagree, 1 not compared" in text
    assert "disagrees: pallets__flask-3/test_output.txt: False here, True there" in text
    assert "FAIL" not in text.partition("Collection checks")[2], "rollouts without steps do not fail"
    graded = document_of(run, "graded.json")
    assert [(log["resolved"], log["agrees"], log["tests_agree"]) for log in graded] == [
        (True, True, False),
        (False, True, None),
        (False, False, False),
        (None, None, None),
    ]
    assert graded[1]["tests_status"]["FAIL_TO_PASS"] == {"success": [], "failure": ["t.py::test_new"]}


def test_instance_rows_are_part_of_the_identity(tmp_path: Path, logs: Path) -> None:
    words = {"paths": ["swe-logs", str(logs), str(tmp_path / "rows.jsonl")]}
    before = Config.model_validate(words).identity()
    assert Config.model_validate(words).identity() == before
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("test_old", "test_older"))
    assert Config.model_validate(words).identity() != before
