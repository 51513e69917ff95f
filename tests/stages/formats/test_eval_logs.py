"""Saved logs graded again: what is read, taken from the harness, compared, and called incomplete."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from needs import REAL, needs

from stages.errors import BadInput
from stages.formats import swebench_logs
from stages.formats.swebench_logs import HARNESS, GradedLog, find_logs, grade_log

SHARED = REAL / "swe-logs"

ROW = {
    "repo": "pallets/flask",
    "instance_id": "pallets__flask-1",
    "FAIL_TO_PASS": '["t.py::test_new"]',
    "PASS_TO_PASS": '["t.py::test_old", "t.py::test_skipped"]',
}
GOOD = "PASSED t.py::test_new\nPASSED t.py::test_old\nSKIPPED t.py::test_skipped\n"
BAD = "PASSED t.py::test_new\nFAILED t.py::test_old - boom\n"


def grade_logs(folder: Path, given: Sequence[Path] = ()) -> list[GradedLog]:
    return [grade_log(log) for log in find_logs(folder, given)]


def container(folder: Path, results: str | None, *, said: bool | None = None, marks: bool = True) -> Path:
    """One instance's folder as the harness in containers leaves it."""
    place = folder / "run/pallets__flask-1"
    place.mkdir(parents=True)
    (folder / "instances.jsonl").write_text(json.dumps(ROW) + "\n")
    (place / "patch.diff").write_text("diff --git a/x b/x\n")
    (place / "run_instance.log").write_text("started\n")
    if results is not None:
        start, end = ("+ : '>>>>> Start Test Output'\n", "+ : '>>>>> End Test Output'\n") if marks else ("", "")
        (place / "test_output.txt").write_text(f"PASSED t.py::test_elsewhere\n{start}{results}{end}")
    if said is not None:
        (place / "report.json").write_text(
            json.dumps({"pallets__flask-1": {"resolved": said, "model_name_or_path": "m"}})
        )
    return folder


def plain(folder: Path, text: str, resolved: list[str], name: str = "pallets__flask-1.some.model") -> Path:
    """One log and the list of its run, as the harness of early 2024 leaves them."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.eval.log.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "report.json").write_text(json.dumps({"resolved": resolved}))
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return folder


APPLIED = "PASSED t.py::test_new\n>>>>> Applied Patch (pred)\n>>>>> Applied Patch (test)\n"


@pytest.mark.parametrize(("results", "resolved"), [(GOOD, True), (BAD, False), ("", False)])
def test_a_container_log_is_graded_by_its_results(results: str, resolved: bool, tmp_path: Path) -> None:
    (one,) = grade_logs(container(tmp_path, results, said=resolved))
    assert (one.resolved, one.agrees, one.eval_log.model, one.eval_log.patch) == (
        resolved,
        True,
        "m",
        "diff --git a/x b/x\n",
    )


@pytest.mark.parametrize(
    ("folder", "model"),
    [("logs/run_evaluation/a_run/org__model", "org/model"), ("20240620_agent/logs", "20240620_agent"), ("x/y", None)],
)
def test_the_model_of_a_container_log_is_known_by_its_folders(folder: str, model: str | None, tmp_path: Path) -> None:
    place = container(tmp_path, GOOD) / "run/pallets__flask-1"
    (tmp_path / folder).mkdir(parents=True)
    place.rename(tmp_path / folder / place.name)
    assert [one.eval_log.model for one in grade_logs(tmp_path)] == [model]


def test_a_wrong_report_is_called_a_disagreement(tmp_path: Path) -> None:
    found = grade_logs(container(tmp_path, BAD, said=True))
    assert found[0].agrees is False
    assert (
        "  disagrees: run/pallets__flask-1/test_output.txt: False here, True there"
        in swebench_logs.agreement_report(found)
    )


def test_a_test_in_another_place_is_noticed(tmp_path: Path) -> None:
    container(tmp_path, GOOD)
    status = {
        "FAIL_TO_PASS": {"success": ["t.py::test_new"], "failure": []},
        "PASS_TO_PASS": {"success": [], "failure": ["t.py::test_old"]},
    }
    report = {"pallets__flask-1": {"resolved": True, "tests_status": status}}
    (tmp_path / "run/pallets__flask-1/report.json").write_text(json.dumps(report))
    assert [one.tests_agree for one in grade_logs(tmp_path)] == [False]


def test_an_incomplete_log_is_named(tmp_path: Path) -> None:
    (one,) = grade_logs(container(tmp_path / "a", None))
    assert one.resolved is None and one.grader is None and "incomplete: no test output" in str(one.problem)
    (one,) = grade_logs(container(tmp_path / "b", GOOD, marks=False))
    assert one.resolved is None and "no complete test output" in str(one.problem)
    place = container(tmp_path / "c", None) / "run/pallets__flask-1"
    (place / "run_instance.log").write_text(">>>>> Patch Apply Failed:\n")
    (one,) = grade_logs(tmp_path / "c")
    assert one.resolved is None and "run_instance.log says '>>>>> Patch Apply Failed'" in str(one.problem)


def test_a_report_without_a_log_is_taken_over_and_called_so(tmp_path: Path) -> None:
    (one,) = grade_logs(container(tmp_path, None, said=True))
    assert (one.resolved, one.agrees, one.grader) == (True, None, HARNESS)


def test_a_carriage_return_ends_a_line_as_it_does_for_the_harness(tmp_path: Path) -> None:
    results = "downloading 3%\rPASSED t.py::test_new\r\nPASSED t.py::test_old\nSKIPPED t.py::test_skipped\n"
    place = container(tmp_path, "", said=True) / "run/pallets__flask-1/test_output.txt"
    place.write_bytes(f">>>>> Start Test Output\n{results}>>>>> End Test Output\n\xff".encode("latin-1"))
    assert [one.agrees for one in grade_logs(tmp_path)] == [True]


def test_torn_and_foreign_files_around_a_log_do_no_harm(tmp_path: Path) -> None:
    folder = container(tmp_path / "logs", GOOD)
    for path, text in {
        "run/pallets__flask-1/report.json": '{"pallets__fl',
        "run/preds.json": "[1, 2",
        "run/notes.jsonl": "no JSON",
        "../swe-torn.jsonl": '{"instance_id',
        "../swe-torn.parquet": "no table",
    }.items():
        (folder / path).write_text(text)
    (one,) = grade_logs(folder)
    assert (one.eval_log.instance, one.resolved, one.agrees) == ("pallets__flask-1", True, None)


def test_the_folder_of_one_instance_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = container(tmp_path, GOOD) / "run/pallets__flask-1"
    monkeypatch.chdir(place)
    for folder in (place, Path(".")):
        (one,) = grade_logs(folder)
        assert (one.eval_log.instance, one.resolved, one.eval_log.file) == ("pallets__flask-1", True, "test_output.txt")


@pytest.mark.parametrize("mark", [">>>>> Patch Apply Failed", ">>>>> Tests Timed Out after 1800 seconds"])
def test_a_container_log_of_a_failed_run_resolves_nothing(mark: str, tmp_path: Path) -> None:
    (one,) = grade_logs(container(tmp_path, f"{GOOD}{mark}\n", said=False))
    assert one.resolved is False and one.agrees and mark[:20] in str(one.problem)


@pytest.mark.parametrize("exit_mark", ["All Tests Passed", "Some Tests Failed"])
def test_the_exit_marker_of_an_early_log_is_not_the_grade(exit_mark: str, tmp_path: Path) -> None:
    (good,) = grade_logs(plain(tmp_path / "a", f"{APPLIED}{GOOD}>>>>> {exit_mark}\n", ["pallets__flask-1"]))
    (bad,) = grade_logs(plain(tmp_path / "b", f"{APPLIED}{BAD}>>>>> {exit_mark}\n", []))
    assert (good.resolved, good.agrees, bad.resolved, bad.agrees) == (True, True, False, True)
    assert good.eval_log.model == "some.model"


@pytest.mark.parametrize("exit_mark", ["All Tests Passed", "Some Tests Failed"])
def test_an_early_log_whose_tests_ended_without_a_result_is_unresolved(exit_mark: str, tmp_path: Path) -> None:
    crashed = "ImportError while loading conftest\n"
    (ended,) = grade_logs(
        plain(tmp_path / "a", f"{APPLIED.partition('.py::test_new')[2]}{crashed}>>>>> {exit_mark}\n", [])
    )
    assert (ended.resolved, ended.grader, ended.agrees) == (False, "composer", True)
    assert ended.problem == "the tests ended without a single result"
    (tmp_path / "a/report.json").unlink()
    assert [one.resolved for one in grade_logs(tmp_path / "a")] == [False]
    (cut,) = grade_logs(plain(tmp_path / "b", f">>>>> Applied Patch (test)\n{crashed}", []))
    assert cut.grader == HARNESS and str(cut.problem).startswith("incomplete")


@pytest.mark.parametrize("said", [None, False])
def test_a_container_log_whose_tests_ended_without_a_result_is_unresolved_and_says_so(
    said: bool | None, tmp_path: Path
) -> None:
    folder = container(tmp_path, "ImportError while loading conftest\n", said=said)
    path = folder / "run/pallets__flask-1/test_output.txt"
    path.write_text(path.read_text().replace("PASSED t.py::test_elsewhere\n", ""))
    (one,) = grade_logs(folder)
    assert (one.resolved, one.problem) == (False, "the tests ended without a single result")


def test_a_log_without_results_gets_the_verdict_of_its_run(tmp_path: Path) -> None:
    (one,) = grade_logs(plain(tmp_path, ">>>>> Applied Patch (test)\n", ["pallets__flask-1"]))
    assert (one.resolved, one.agrees, one.grader) == (True, None, HARNESS)
    assert one.problem == "incomplete: the log holds no result of any test"


def test_a_patch_that_did_not_apply_is_a_verdict(tmp_path: Path) -> None:
    (one,) = grade_logs(plain(tmp_path, ">>>>> Patch Apply Failed\n", []))
    assert (one.resolved, one.agrees) == (False, True)


def test_a_damaged_archive_is_incomplete(tmp_path: Path) -> None:
    folder = plain(tmp_path, APPLIED + GOOD + "x" * 9999, ["pallets__flask-1"])
    (path,) = folder.glob("*.gz")
    path.write_bytes(path.read_bytes()[:-12])
    (one,) = grade_logs(folder)
    assert one.grader == HARNESS and "the archive is damaged" in str(one.problem)


def test_an_instance_that_is_not_known_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder = plain(tmp_path / "logs", APPLIED + GOOD, [], name="pallets__flask-2.m")
    (one,) = grade_logs(folder)
    assert (one.resolved, one.agrees, one.grader) == (False, None, HARNESS)
    assert "name a file of instances after the folder" in str(one.problem)
    (tmp_path / "more.jsonl").write_text(json.dumps(ROW | {"instance_id": "pallets__flask-2"}))
    (one,) = grade_logs(folder, [tmp_path / "more.jsonl"])
    assert one.resolved is True and one.agrees is False
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(BadInput, match=r"torn\.jsonl"):
        grade_logs(folder, [tmp_path / "torn.jsonl"])


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no logs"):
        grade_logs(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        grade_logs(tmp_path / "missing")


@pytest.fixture(scope="module")
def real_logs() -> list[GradedLog]:
    return grade_logs(SHARED)


@needs("real")
def test_every_docker_report_is_met_to_the_single_test(real_logs: list[GradedLog]) -> None:
    logs = [one for one in real_logs if one.eval_log.file.startswith("docker-harness/")]
    assert Counter((one.agrees, one.tests_agree) for one in logs) == {(True, True): 16, (None, None): 1}
    assert [one.eval_log.instance for one in logs if one.resolved is None] == ["pydata__xarray-6992"]


@needs("real")
def test_every_early_log_gets_the_verdict_of_its_list(real_logs: list[GradedLog]) -> None:
    logs = [one for one in real_logs if one.eval_log.file.startswith("log-harness/")]
    assert len(logs) == 46 and all(one.resolved == one.eval_log.harness_resolved for one in logs)
    assert [one.eval_log.instance for one in logs if one.agrees is None] == ["psf__requests-2317"]


@needs("real")
def test_the_logs_of_swe_smith_are_met_too(real_logs: list[GradedLog]) -> None:
    logs = [one for one in real_logs if one.eval_log.file.startswith("swe-smith/")]
    assert [one.tests_agree for one in logs] == [True] * 4
