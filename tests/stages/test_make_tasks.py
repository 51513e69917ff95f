"""make-tasks: from a package to tasks that `collect` and SWE-bench's tools read."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.command_line import command, environment, until
from support.shelf import SHELF, write

from stages import make_tasks
from stages.envs.base import TWIN
from stages.envs.feature_deletion.env import FeatureDeletionEnv
from stages.errors import BadInput, Incomplete
from stages.runs import runner
from stages.runs.kinds import TASK
from stages.runs.run import Run

TOLD = list[str]()
"""What every run here reported while it worked."""
BROKEN = {"tests/test_elsewhere.py": "import nowhere_to_be_found\n"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tasks of the small package, one of whose test files cannot be collected."""
    folder = tmp_path_factory.mktemp("made")
    package = write(folder / "shelf-1.5", SHELF | BROKEN)
    return make(folder, package, tasks=2)


def make(root: Path, package: Path, *, on: str | None = None, **more: object) -> Run:
    config = make_tasks.Config(package=str(package), difficulty="easy", **more)
    done = runner.execute(
        "tasks", {}, config, root=root / "artifacts", on=on, listener=lambda what, done, total: TOLD.append(what)
    )
    return Run(done.path)


def test_a_run_holds_tasks_and_the_same_as_instances(made: Run) -> None:
    rows = made.rows(TASK)
    instances = [json.loads(line) for line in (made.path / "instances.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [one["instance_id"] for one in instances] and len(rows) == 2
    assert [json.loads(row["data_json"]) for row in rows] == instances


def test_the_report_names_what_was_rejected_and_which_tests_were_not_run(made: Run) -> None:
    report = (made.path / "report.txt").read_text()
    assert report.startswith("2 tasks; ") and "1 test files could not be collected" in report
    assert "tests/test_elsewhere.py: ModuleNotFoundError" in report
    assert "No metadata says which distribution holds nowhere_to_be_found; the package declares nothing" in report
    assert made.manifest.counts["tried"] == 2 and "of 2 candidates tried 0 rejected\n" in report


@pytest.mark.slow
def test_equal_work_gives_equal_content(made: Run, tmp_path: Path) -> None:
    again = runner.execute("tasks", {}, make_tasks.Config.model_validate(made.manifest.config), root=tmp_path)
    assert Run(again.path).manifest.content == made.manifest.content


@pytest.mark.slow
def test_workers_try_the_same_candidates(tmp_path: Path) -> None:
    """The same rows, reasons and report; the tests are measured before anything is removed in one process alone."""
    package = write(tmp_path / "shelf-1.5", SHELF | BROKEN)
    here, there = (make(tmp_path / (on or "here"), package, tasks=4, on=on) for on in (None, "processes:2"))
    assert there.manifest.content == here.manifest.content and there.manifest.counts == here.manifest.counts
    assert (there.path / "report.txt").read_text() == (here.path / "report.txt").read_text()
    assert len(list(there.units())) == len(list(here.units()))


def test_an_environment_serves_the_tasks_of_a_run_and_their_twins(made: Run) -> None:
    row = made.rows(TASK)[0]
    env = FeatureDeletionEnv(tasks=str(made.path), twins="beside")
    task, twin = env.tasks(row["split"], 2, seed=7)
    assert (task.task_id, twin.task_id, twin.prompt) == (row["task_id"], row["task_id"] + TWIN, row["prompt"])


SLOW = {"tests/test_slow.py": "import time\n\ndef test_slow():\n    time.sleep(60)\n"}
COMPILED = {
    "shelf_speed/_fast.c": "int fast(void) { return 1; }\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture(autouse=True)\ndef compiled():\n"
    "    assert False, 'C extension not loaded'\n",
}


def test_a_time_limit_ends_the_first_runs_with_the_reason(tmp_path: Path) -> None:
    package = write(tmp_path / "shelf-1.5", SHELF | SLOW)
    began = time.monotonic()
    with pytest.raises(
        Incomplete, match=r"0 of 2 tasks from 0 candidates\. The time limit of 3 s is over .* did not end"
    ):
        make(tmp_path, package, tasks=2, time_limit_s=3.0)
    assert time.monotonic() - began < 20
    (folder,) = (tmp_path / "artifacts" / "tasks").glob("2*")
    assert "The time limit of 3 s is over" in (folder / "report.txt").read_text()
    assert Run(folder).manifest.status == "incomplete"


def test_a_signal_ends_running_tests_within_seconds(tmp_path: Path) -> None:
    package = write(tmp_path / "shelf-1.5", SHELF | SLOW)
    words = command("tasks", "feature-deletion", package, "-s", "tasks=2")
    with subprocess.Popen(words, env=environment(tmp_path / "artifacts"), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: list((tmp_path / "artifacts").glob("tasks/2*/manifest.json")))
        time.sleep(3)  # in the first runs of all tests, which take a minute
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
    assert time.monotonic() - began < 20 and process.returncode == 143, errors
    assert "Stopped by SIGTERM" in errors and "Traceback" not in errors


def test_tests_that_need_a_compiled_part_are_refused_with_their_own_reason(tmp_path: Path) -> None:
    package = write(tmp_path / "shelf-1.5", SHELF | COMPILED)
    with pytest.raises(BadInput) as refused:
        make(tmp_path, package, tasks=2)
    assert "the first with AssertionError: C extension not loaded" in str(refused.value)
    assert "compiled parts (shelf_speed/_fast.c), which are not built here" in str(refused.value)


def test_the_step_that_takes_long_is_told(made: Run) -> None:
    steps = ("for the first time", "again, with coverage", "without the code", "restored", "contradicting", "trivial")
    assert [step for step in steps if not any(step in one for one in TOLD)] == []


def test_a_package_without_tests_is_refused_in_a_sentence(tmp_path: Path) -> None:
    package = write(tmp_path / "bare", {"bare.py": "def f():\n    return 1\n"})
    with pytest.raises(BadInput, match="no tests that pytest finds"):
        make(tmp_path, package)


def test_a_package_of_getters_gives_nothing_and_says_so(tmp_path: Path) -> None:
    tests = "import bare\n\ndef test_f():\n    assert bare.f() == 1\n"
    package = write(tmp_path / "bare", {"bare.py": "def f():\n    return 1\n", "test_bare.py": tests})
    with pytest.raises(Incomplete, match="no function or class"):
        make(tmp_path, package)
