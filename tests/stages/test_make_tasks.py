"""make-tasks: from a package, with or without a proposer, to tasks that `collect` and SWE-bench's tools read."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import command, environment, until
from support.refusals import refused
from support.sample_package import SHELF, write
from support.server import Reply, Server, answer, serving

from composer_stages import make_tasks
from composer_stages.envs.feature_deletion.env import FeatureDeletionEnv
from composer_stages.errors import BadInput, ComposerError, Incomplete
from composer_stages.runs import runner
from composer_stages.runs.kinds import TASK
from composer_stages.runs.run import Run
from composer_stages.terms import TWIN

STEPS = list[str]()
"""What every run here reported while it worked."""
BROKEN = {"tests/test_elsewhere.py": "import nowhere_to_be_found\n"}


def configured(package: Path, **more: Any) -> make_tasks.Config:
    return make_tasks.Config(package=str(package), difficulty="easy", **more)


def make(root: Path, config: make_tasks.Config, **more: Any) -> Run:
    listening = {"listener": lambda what, done, total: STEPS.append(what), **more}
    return Run(runner.execute("tasks", {}, config, root=root / "artifacts", **listening).path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A task of the small package, one of whose test files cannot be collected."""
    folder = tmp_path_factory.mktemp("made")
    return make(folder, configured(write(folder / "shelf-1.5", SHELF | BROKEN), tasks=1))


def test_run_holds_tasks_and_equal_instances(made: Run) -> None:
    rows = made.rows(TASK)
    instances = [json.loads(line) for line in (made.path / "instances.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [instance["instance_id"] for instance in instances] and len(rows) == 1
    assert [json.loads(row["data_json"]) for row in rows] == instances


def test_report_names_rejections_and_uncollected_files(made: Run) -> None:
    report = (made.path / "report.txt").read_text()
    assert report.startswith("1 task; ") and "1 test files could not be collected" in report
    assert "tests/test_elsewhere.py: ModuleNotFoundError" in report and "nowhere_to_be_found" in report
    assert made.manifest.counts["tried"] == 1 and "of 1 candidate tried 0 rejected\n" in report
    steps = ("for the first time", "again, with coverage", "without the code", "restored", "contradicting", "trivial")
    assert [step for step in steps if not any(step in message for message in STEPS)] == []


def test_environment_serves_the_tasks_of_a_run_and_their_twins(made: Run) -> None:
    row = made.rows(TASK)[0]
    env = FeatureDeletionEnv(tasks=str(made.path), twins="beside")
    task, twin = env.tasks(row["split"], 2, seed=7)
    assert (task.task_id, twin.task_id, twin.prompt) == (row["task_id"], row["task_id"] + TWIN, row["prompt"])


SLOW = {"tests/test_slow.py": "import time\n\ndef test_slow():\n    time.sleep(60)\n"}


def test_time_limit_ends_the_first_runs_of_tests(tmp_path: Path) -> None:
    package = write(tmp_path / "shelf-1.5", SHELF | SLOW)
    began = time.monotonic()
    config = configured(package, tasks=2, time_limit_s=3.0)
    refused(lambda: make(tmp_path, config), Incomplete, code="task-time-over", num_tasks=0, num_tried=0)
    assert time.monotonic() - began < 20
    (folder,) = (tmp_path / "artifacts" / "tasks").glob("2*")
    assert "time limit of 3 s" in (folder / "report.txt").read_text()
    assert Run(folder).manifest.status == "incomplete"


def test_signal_ends_running_tests(tmp_path: Path) -> None:
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


COMPILED = {
    "shelf_speed/_fast.c": "int fast(void) { return 1; }\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture(autouse=True)\ndef compiled():\n"
    "    assert False, 'C extension not loaded'\n",
}
BARE = {"bare.py": "def f():\n    return 1\n"}
GETTERS = {**BARE, "test_bare.py": "import bare\n\ndef test_f():\n    assert bare.f() == 1\n"}


ALL_FAIL = {"reason": "AssertionError: C extension not loaded", "compiled": ["shelf_speed/_fast.c"]}


@pytest.mark.parametrize(
    ("name", "files", "error", "code", "values"),
    [
        ("shelf-1.5", SHELF | COMPILED, BadInput, "envs.feature_deletion.all-tests-fail", ALL_FAIL),
        ("bare", BARE, BadInput, "envs.feature_deletion.no-tests", {}),
        ("bare", GETTERS, Incomplete, "no-candidates", {}),
    ],
    ids=["compiled", "no tests", "getters"],
)
def test_package_without_a_task_is_refused(
    tmp_path: Path, name: str, files: dict[str, str], error: type[ComposerError], code: str, values: dict[str, Any]
) -> None:
    config = configured(write(tmp_path / name, files), tasks=2)
    refused(lambda: make(tmp_path, config), error, code=code, **values)


# A proposer: a server that answers well, badly and with malice, and what is paid for it


def features(*named: tuple[str, list[str]]) -> str:
    return json.dumps({"features": [{"feature": name, "symbols": symbols} for name, symbols in named]})


def helpful(body: dict[str, Any], earlier: int) -> Reply:
    """Proposes one symbol that does not exist and two that it is shown and did not name before."""
    text = body["messages"][-1]["content"]
    shown = [line.partition(" (")[0] for line in text.splitlines() if line.startswith("shelf/")]
    named = [(f"what {name} does", [name]) for name in shown if f"- {name}" not in text]
    said = features(("nothing", ["shelf/words.py:nothing"]), *named[:2])
    return Reply(body=answer(said, prompt_tokens=20_000, completion_tokens=1_000))  # no fewer than these texts have


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("proposed") / "shelf-1.5", SHELF)


def proposed(package: Path, server: Server, **more: Any) -> make_tasks.Config:
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}
    return configured(package, proposer={"model": "m", "base_url": server.url, "max_attempts": 1, **prices}, **more)


@pytest.mark.slow
def test_proposed_features_become_tasks_and_answers_are_paid_once(package: Path, tmp_path: Path) -> None:
    """Stopped before any of its candidates was tried, and resumed; and in another run that shares the cache."""
    with serving(helpful) as server:
        config = proposed(package, server, tasks=2, questions=6)
        run = make(tmp_path, config)
        asked, rows = len(server.requests), run.rows(TASK)
        assert len(rows) == 2 and run.manifest.models["proposer"]["model"] == "m"
        for row in rows:
            data = json.loads(row["data_json"])
            assert data["feature"] == f"what {data['removed'][0]} does" and data["feature"] not in row["prompt"]
            assert json.loads(data["FAIL_TO_PASS"]) and json.loads(data["PASS_TO_PASS"]) and data["twin"]
        report = (run.path / "report.txt").read_text()
        assert "questions to m: " in report and "  the package has no such symbol\n" in report
        assert run.manifest.counts["refused, the package has no such symbol"] == asked
        assert run.manifest.cost_usd == pytest.approx(0.022 * asked)

        def stops(what: str, done: int, total: int) -> None:
            if what.startswith("tasks, "):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, config, out=tmp_path / "stopped", listener=stops)
        assert len(server.requests) == asked, "the answers are in the cache of all runs"
        resumed = make(tmp_path, config, out=tmp_path / "stopped", resume=True)
        assert len(server.requests) == asked and resumed.manifest.content == run.manifest.content


def test_useless_proposer_is_asked_only_as_often_as_allowed(package: Path, tmp_path: Path) -> None:
    """It answers in prose, then with names that hold control characters or lead elsewhere, then not at all."""
    hostile = features(("\x1b[2J", ["../../../../etc/passwd:root"]), ("x", ["tests/test_words.py:test_titled"]))
    replies = [Reply(body=answer(text)) for text in ("Delete whatever you like.", hostile)]
    replies += [Reply(400, {"error": {"message": "I would rather not"}})]
    with serving(lambda body, earlier: replies[earlier]) as server:
        config = proposed(package, server, tasks=1, questions=3)
        refused(lambda: make(tmp_path, config), Incomplete, code="no-feature-to-try")
        assert len(server.requests) == 3
    (folder,) = (tmp_path / "artifacts" / "tasks").glob("2*")
    counts, report = Run(folder).manifest.counts, (folder / "report.txt").read_text()
    reasons = {name: number for name, number in counts.items() if name.startswith("refused, ")}
    assert reasons == {"refused, an answer holds no list of features": 2, "refused, the package has no such symbol": 2}
    assert "3 questions to m: 0 features to try" in report and "\x1b" not in report


def test_run_resumes_after_the_server_was_down(package: Path, tmp_path: Path) -> None:
    up = [False]

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return helpful(body, 0) if up[0] else Reply(503, {"error": {"message": "later"}})

    with serving(reply) as server:
        config = proposed(package, server, tasks=1, questions=1)
        refused(lambda: make(tmp_path, config), Incomplete, "503", code="proposer-failed")
        up[0] = True
        assert len(make(tmp_path, config, resume=True).rows(TASK)) == 1


def test_identity_and_plan_of_a_proposer(package: Path) -> None:
    one, other = (configured(package, questions=n) for n in (5, 50))
    assert one.identity() == other.identity() and "proposer" not in one.identity()
    with serving(helpful) as server:
        assert proposed(package, server).identity() != proposed(package, server, questions=5).identity()
        plan = make_tasks.plan({}, proposed(package, server, tasks=3, questions=6))
    assert plan.max_completion_tokens == 6 * 2048 and plan.max_cost_usd == pytest.approx(6 * 2048 * 2e-6)
    assert "features proposed by m, in at most 6 answers" in plan.notes


@pytest.mark.slow
def test_workers_make_the_same_tasks(package: Path, tmp_path: Path) -> None:
    """The same rows and reasons as in one process, which measures the unmodified tests for them."""
    with serving(helpful) as server:
        config = proposed(package, server, tasks=2, questions=6)
        runs = [make(tmp_path / (on or "one"), config, on=on) for on in (None, "processes:2")]
    contents = [(run.manifest.content, run.manifest.counts, run.read_file("report.txt")) for run in runs]
    assert contents[0] == contents[1] and len({len(list(run.units())) for run in runs}) == 1
