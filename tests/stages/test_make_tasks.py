"""make-tasks: from a package, with or without a proposer, to tasks that `collect` and SWE-bench's tools read."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import command, environment, until
from support.sample_package import SHELF, write
from support.server import Reply, Server, answer, serving

from stages import make_tasks
from stages.envs.feature_deletion.env import FeatureDeletionEnv
from stages.errors import BadInput, Incomplete
from stages.runs import runner
from stages.runs.kinds import TASK
from stages.runs.run import Run
from stages.terms import TWIN

TOLD = list[str]()
"""What every run here reported while it worked."""
BROKEN = {"tests/test_elsewhere.py": "import nowhere_to_be_found\n"}


def configured(package: Path, **more: Any) -> make_tasks.Config:
    return make_tasks.Config(package=str(package), difficulty="easy", **more)


def make(root: Path, config: make_tasks.Config, **more: Any) -> Run:
    listening = {"listener": lambda what, done, total: TOLD.append(what), **more}
    return Run(runner.execute("tasks", {}, config, root=root / "artifacts", **listening).path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A task of the small package, one of whose test files cannot be collected."""
    folder = tmp_path_factory.mktemp("made")
    return make(folder, configured(write(folder / "shelf-1.5", SHELF | BROKEN), tasks=1))


def test_a_run_holds_tasks_and_the_same_as_instances(made: Run) -> None:
    rows = made.rows(TASK)
    instances = [json.loads(line) for line in (made.path / "instances.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [one["instance_id"] for one in instances] and len(rows) == 1
    assert [json.loads(row["data_json"]) for row in rows] == instances


def test_reports_name_what_was_rejected_which_tests_were_not_run_and_each_step(made: Run) -> None:
    report = (made.path / "report.txt").read_text()
    assert report.startswith("1 task; ") and "1 test files could not be collected" in report
    assert "tests/test_elsewhere.py: ModuleNotFoundError" in report and "nowhere_to_be_found" in report
    assert made.manifest.counts["tried"] == 1 and "of 1 candidate tried 0 rejected\n" in report
    steps = ("for the first time", "again, with coverage", "without the code", "restored", "contradicting", "trivial")
    assert [step for step in steps if not any(step in one for one in TOLD)] == []


def test_an_environment_serves_the_tasks_of_a_run_and_their_twins(made: Run) -> None:
    row = made.rows(TASK)[0]
    env = FeatureDeletionEnv(tasks=str(made.path), twins="beside")
    task, twin = env.tasks(row["split"], 2, seed=7)
    assert (task.task_id, twin.task_id, twin.prompt) == (row["task_id"], row["task_id"] + TWIN, row["prompt"])


@pytest.mark.slow
def test_equal_work_gives_equal_content(made: Run, tmp_path: Path) -> None:
    again = make(tmp_path, make_tasks.Config.model_validate(made.manifest.config))
    assert again.manifest.content == made.manifest.content


def assert_workers_make_the_same(root: Path, config: make_tasks.Config) -> None:
    """The same rows and reasons; the tests are measured before anything is removed in one process alone."""
    here, there = (make(root / (on or "here"), config, on=on) for on in (None, "processes:2"))
    assert there.manifest.content == here.manifest.content and there.manifest.counts == here.manifest.counts
    assert (there.path / "report.txt").read_text() == (here.path / "report.txt").read_text()
    assert len(list(there.units())) == len(list(here.units()))


@pytest.mark.slow
def test_workers_try_the_same_candidates(tmp_path: Path) -> None:
    assert_workers_make_the_same(tmp_path, configured(write(tmp_path / "shelf-1.5", SHELF | BROKEN), tasks=4))


SLOW = {"tests/test_slow.py": "import time\n\ndef test_slow():\n    time.sleep(60)\n"}


def test_a_time_limit_ends_the_first_runs_with_the_reason(tmp_path: Path) -> None:
    package = write(tmp_path / "shelf-1.5", SHELF | SLOW)
    began = time.monotonic()
    with pytest.raises(Incomplete, match=r"0 of 2 tasks from 0 candidates\. .*3 s"):
        make(tmp_path, configured(package, tasks=2, time_limit_s=3.0))
    assert time.monotonic() - began < 20
    (folder,) = (tmp_path / "artifacts" / "tasks").glob("2*")
    assert "time limit of 3 s" in (folder / "report.txt").read_text()
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


COMPILED = {
    "shelf_speed/_fast.c": "int fast(void) { return 1; }\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture(autouse=True)\ndef compiled():\n"
    "    assert False, 'C extension not loaded'\n",
}
BARE = {"bare.py": "def f():\n    return 1\n"}
GETTERS = {**BARE, "test_bare.py": "import bare\n\ndef test_f():\n    assert bare.f() == 1\n"}


@pytest.mark.parametrize(
    ("name", "files", "error", "words"),
    [
        (
            "shelf-1.5",
            SHELF | COMPILED,
            BadInput,
            r"AssertionError: C extension not loaded.*compiled parts \(shelf_speed/_fast\.c\)",
        ),
        ("bare", BARE, BadInput, "no tests that pytest finds"),
        ("bare", GETTERS, Incomplete, "no function or class"),
    ],
    ids=["compiled", "no tests", "getters"],
)
def test_a_package_that_gives_no_task_is_refused_with_the_reason(
    tmp_path: Path, name: str, files: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        make(tmp_path, configured(write(tmp_path / name, files), tasks=2))


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
def test_features_of_a_model_are_validated_like_others_and_answers_are_paid_once(package: Path, tmp_path: Path) -> None:
    """Stopped before any of its candidates was tried, and resumed; and in another run that shares the cache."""
    with serving(helpful) as server:
        wanted = proposed(package, server, tasks=3, questions=6)
        run = make(tmp_path, wanted)
        asked, rows = len(server.requests), run.rows(TASK)
        assert len(rows) == 3 and run.manifest.models["proposer"]["model"] == "m"
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
            make(tmp_path, wanted, out=tmp_path / "stopped", listener=stops)
        assert len(server.requests) == asked, "the answers are in the cache of all runs"
        resumed = make(tmp_path, wanted, out=tmp_path / "stopped", resume=True)
        assert len(server.requests) == asked and resumed.manifest.content == run.manifest.content


def test_a_model_that_proposes_nothing_of_use_is_asked_so_often_and_no_more(package: Path, tmp_path: Path) -> None:
    """It answers in prose, then with names that hold control characters or lead elsewhere, then not at all."""
    hostile = features(("\x1b[2J", ["../../../../etc/passwd:root"]), ("x", ["tests/test_words.py:test_titled"]))
    replies = [Reply(body=answer(text)) for text in ("Delete whatever you like.", hostile)]
    replies += [Reply(400, {"error": {"message": "I would rather not"}})]
    with serving(lambda body, earlier: replies[earlier]) as server:
        with pytest.raises(Incomplete, match="None of the proposer's features"):
            make(tmp_path, proposed(package, server, tasks=1, questions=3))
        assert len(server.requests) == 3
    (folder,) = (tmp_path / "artifacts" / "tasks").glob("2*")
    counts, report = Run(folder).manifest.counts, (folder / "report.txt").read_text()
    refused = {name: number for name, number in counts.items() if name.startswith("refused, ")}
    assert refused == {"refused, an answer holds no list of features": 2, "refused, the package has no such symbol": 2}
    assert "3 questions to m: 0 features to try" in report and "\x1b" not in report


def test_a_server_that_is_down_leaves_what_was_made_and_can_be_asked_again(package: Path, tmp_path: Path) -> None:
    up = [False]

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return helpful(body, 0) if up[0] else Reply(503, {"error": {"message": "later"}})

    with serving(reply) as server:
        wanted = proposed(package, server, tasks=1, questions=2)
        with pytest.raises(Incomplete, match="503"):
            make(tmp_path, wanted)
        up[0] = True
        assert len(make(tmp_path, wanted, resume=True).rows(TASK)) == 1


def test_questions_count_only_where_a_proposer_is_asked(package: Path) -> None:
    one, other = (configured(package, questions=n) for n in (5, 50))
    assert one.identity() == other.identity() and "proposer" not in one.identity()
    with serving(helpful) as server:
        assert proposed(package, server).identity() != proposed(package, server, questions=5).identity()
        plan = make_tasks.plan({}, proposed(package, server, tasks=3, questions=6))
    assert plan.max_completion_tokens == 6 * 2048 and plan.max_cost_usd == pytest.approx(6 * 2048 * 2e-6)
    assert "features proposed by m, in at most 6 answers" in plan.notes


@pytest.mark.slow
def test_workers_try_what_was_proposed(package: Path, tmp_path: Path) -> None:
    with serving(helpful) as server:
        assert_workers_make_the_same(tmp_path, proposed(package, server, tasks=2, questions=6))
