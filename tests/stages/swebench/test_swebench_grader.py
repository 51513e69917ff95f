"""swebench's own grader gives the grades of ours on classic rows."""

import json
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import REAL, needs

from composer_stages.envs.swe.instances import load
from composer_stages.swebench import logs
from composer_stages.swebench.lists import lists_of
from composer_stages.swebench.logs import END, START, grade_container_log

SHARED = REAL / "swe-logs/docker-harness"
ROW = {
    "repo": "pallets/flask",
    "version": "2.3",
    "instance_id": "pallets__flask-1",
    "FAIL_TO_PASS": '["t.py::test_new"]',
    "PASS_TO_PASS": '["t.py::test_old", "t.py::test_skipped"]',
}


def log(results: str) -> str:
    return f"+ : '{START}'\n{results}+ : '{END}'\n"


LOGS = {
    "all pass": log("PASSED t.py::test_new\nPASSED t.py::test_old\nSKIPPED t.py::test_skipped\n"),
    "one fails": log("PASSED t.py::test_new\nFAILED t.py::test_old - no\n"),
    "the fix is skipped": log("SKIPPED t.py::test_new\nPASSED t.py::test_old\nPASSED t.py::test_skipped\n"),
    "the fix passes unexpectedly": log("XPASS t.py::test_new\nPASSED t.py::test_old\nPASSED t.py::test_skipped\n"),
    "nothing ran": log(""),
    "the import breaks": log("ImportError while loading conftest\n"),
    "no end": f"+ : '{START}'\nPASSED t.py::test_new\n",
    "timed out": log("PASSED t.py::test_new\nPASSED t.py::test_old\n") + ">>>>> Tests Timed Out\n",
}
RESOLVED = dict.fromkeys(LOGS, False) | {"all pass": True, "the fix is skipped": True}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_is_graded_by_its_lists(kind: str) -> None:
    row = {**ROW, "FAIL_TO_PASS": json.loads(ROW["FAIL_TO_PASS"])}
    assert lists_of(row) == lists_of(ROW), "the lists may be lists"
    ours = grade_container_log(LOGS[kind], lists_of(ROW), ROW["repo"])
    assert ours.resolved == RESOLVED[kind] and (ours.tests_status is None) == (kind in ("no end", "timed out"))
    if kind == "all pass":  # a skipped test counts neither way
        assert ours.tests_status and ours.tests_status["PASS_TO_PASS"] == {"success": ["t.py::test_old"], "failure": []}


def graded_by_swebench(row: dict[str, Any], log: str, folder: Path) -> tuple[bool, Any]:
    """What swebench 4 makes of a log: resolved, and the status of every test."""
    from swebench.harness.grading import get_eval_report

    lists = lists_of(row)
    spec = SimpleNamespace(
        instance_id=row["instance_id"],
        repo=row["repo"],
        version=str(row["version"]),
        FAIL_TO_PASS=list(lists.fail_to_pass),
        PASS_TO_PASS=list(lists.pass_to_pass),
    )
    path = folder / "test_output.txt"
    path.write_text(log, encoding="utf-8")
    prediction = {"instance_id": row["instance_id"], "model_name_or_path": "m", "model_patch": "given"}
    found = get_eval_report(spec, prediction, str(path), include_tests_status=True)[row["instance_id"]]
    return found["resolved"], found.get("tests_status")


@needs("swebench")
@pytest.mark.parametrize("kind", LOGS)
def test_swebench_gives_the_same_grade(kind: str, tmp_path: Path) -> None:
    ours = grade_container_log(LOGS[kind], lists_of(ROW), ROW["repo"])
    assert graded_by_swebench(ROW, LOGS[kind], tmp_path) == (ours.resolved, ours.tests_status)


@needs("real", "swebench")
def test_swebench_gives_the_same_grades_of_real_logs(tmp_path: Path) -> None:
    for row in load(SHARED / "instances.jsonl"):
        path = SHARED / row["instance_id"] / "test_output.txt"
        if path.is_file():
            text = path.read_text(errors="replace")
            ours = grade_container_log(text, lists_of(row), row["repo"])
            assert graded_by_swebench(row, text, tmp_path) == (ours.resolved, ours.tests_status), row["instance_id"]


TESTS = [
    *("t.py::a", "t.py::b[x y]", "t.py::c[/a/b]", "t.py::d[//h]", "t.py::e[MouseButton.LEFT]", "test_a (T)", "test_x"),
    *("A docstring.", "Applying sites.0002_alter_domain_unique...test_no_migrations"),
    "--version is equivalent to version",
]
VERDICTS = [
    *("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"),
    *(" ... ok", " ...  OK", " ... FAIL", " ... ERROR", " ... skipped 'no'"),
    *(" ... ", " ok", " F", " E", " ... Internal Server Error: /x/", "System check identified no issues (0 silenced)"),
]
REST = [
    *("\n", "\n", "\n", " ", "\t", " - boom", "[ 10%]", "\x1b[32m", "[31m"),
    *("____ ", "FAIL: ", "ERROR:", "ok", "sympy/a.py:test_z _"),
]


@needs("swebench")
def test_every_dialect_reads_random_logs_as_swebench_does() -> None:
    from swebench.harness.log_parsers import MAP_REPO_TO_PARSER

    for seed in range(100):
        draw = random.Random(seed)
        text = "".join(draw.choice(draw.choice([TESTS, VERDICTS, REST])) for _ in range(60))
        for repo, ours in logs.LOG_PARSERS.items():
            with suppress(IndexError):  # swebench breaks on a verdict without a test.
                assert MAP_REPO_TO_PARSER[repo](text, None) == ours(text), (repo, text)
