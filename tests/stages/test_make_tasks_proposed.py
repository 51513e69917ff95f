"""make-tasks with a proposer: a server that answers well, badly and with malice, and what is paid for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, Server, answer, serving
from support.shelf import SHELF, write

from stages import make_tasks
from stages.errors import Incomplete
from stages.runs import runner
from stages.runs.kinds import TASK
from stages.runs.run import Run

PRICES = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 2.0}


def features(*named: tuple[str, list[str]]) -> str:
    return json.dumps({"features": [{"feature": name, "symbols": symbols} for name, symbols in named]})


def shown(body: dict[str, Any]) -> list[str]:
    """The symbols that a question shows."""
    lines = body["messages"][-1]["content"].splitlines()
    return [line.partition(" (")[0] for line in lines if line.startswith("shelf/")]


def helpful(body: dict[str, Any], earlier: int) -> Reply:
    """Proposes one symbol that does not exist and two that it is shown and did not name before."""
    text = body["messages"][-1]["content"]
    new = [name for name in shown(body) if f"- {name}" not in text]
    named = [(f"what {name} does", [name]) for name in new[:2]]
    said = features(("nothing", ["shelf/words.py:nothing"]), *named)
    return Reply(body=answer(said, prompt_tokens=20_000, completion_tokens=1_000))  # no fewer than these texts have


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("proposed") / "shelf-1.5", SHELF)


def config(package: Path, server: Server, **more: Any) -> make_tasks.Config:
    proposer = {"model": "m", "base_url": server.url, "max_attempts": 1, **PRICES}
    return make_tasks.Config(package=str(package), difficulty="easy", proposer=proposer, **more)


def make(root: Path, config: make_tasks.Config, **more: Any) -> runner.Result:
    return runner.execute("tasks", {}, config, root=root / "artifacts", **more)


@pytest.mark.slow
def test_features_of_a_model_are_validated_like_others(package: Path, tmp_path: Path) -> None:
    with serving(helpful) as server:
        wanted = config(package, server, tasks=3, questions=6)
        run = Run(make(tmp_path, wanted).path)
        rows = run.rows(TASK)
        assert len(rows) == 3 and run.manifest.models["proposer"]["model"] == "m"
        for row in rows:
            data = json.loads(row["data_json"])
            assert data["feature"] == f"what {data['removed'][0]} does" and data["feature"] not in row["prompt"]
            assert json.loads(data["FAIL_TO_PASS"]) and json.loads(data["PASS_TO_PASS"]) and data["contradictions"]
        report = (run.path / "report.txt").read_text()
        assert "questions to m: " in report and "  the package has no such symbol\n" in report
        asked, spent = len(server.requests), run.manifest.cost_usd
        assert run.manifest.counts["refused, the package has no such symbol"] == asked
        assert spent == pytest.approx(0.022 * asked)


@pytest.mark.slow
def test_answers_are_paid_for_once(package: Path, tmp_path: Path) -> None:
    """Stopped before any of its candidates was tried, and resumed; and in another run that shares the cache."""
    with serving(helpful) as server:
        wanted = config(package, server, tasks=3, questions=6)
        whole = Run(make(tmp_path, wanted).path)
        asked = len(server.requests)

        def stops(what: str, done: int, total: int) -> None:
            if what.startswith("tasks, "):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, wanted, out=tmp_path / "stopped", listener=stops)
        assert len(server.requests) == asked, "the answers are in the cache of all runs"
        done = Run(make(tmp_path, wanted, out=tmp_path / "stopped", resume=True).path)
        assert len(server.requests) == asked and done.manifest.content == whole.manifest.content


BAD: dict[str, tuple[Callable[[dict[str, Any], int], Reply], str]] = {
    "prose": (lambda body, earlier: Reply(body=answer("Delete whatever you like.")), "holds no list of features"),
    "hostile names": (
        lambda body, earlier: Reply(
            body=answer(
                features(("\x1b[2J", ["../../../../etc/passwd:root"]), ("x", ["tests/test_words.py:test_titled"]))
            )
        ),
        "has no such symbol",
    ),
    "refuses every time": (
        lambda body, earlier: Reply(400, {"error": {"message": "I would rather not"}}),
        "holds no list of features",
    ),
    "no text": (lambda body, earlier: Reply(body=answer("")), "holds no list of features"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_model_that_proposes_nothing_of_use_is_asked_so_often_and_no_more(
    case: str, package: Path, tmp_path: Path
) -> None:
    reply, reason = BAD[case]
    with serving(reply) as server:
        with pytest.raises(Incomplete, match=f"None of the proposer's features can be tried.*{reason}"):
            make(tmp_path, config(package, server, tasks=1, questions=3))
        assert len(server.requests) == 3
    (report,) = (tmp_path / "artifacts" / "tasks").glob("2*/report.txt")
    assert "3 questions to m: 0 features to try" in report.read_text() and "\x1b" not in report.read_text()


def test_a_server_that_is_down_leaves_what_was_made_and_can_be_asked_again(package: Path, tmp_path: Path) -> None:
    up = [False]

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        return helpful(body, 0) if up[0] else Reply(503, {"error": {"message": "later"}})

    with serving(reply) as server:
        wanted = config(package, server, tasks=1, questions=2)
        with pytest.raises(Incomplete, match="m did not say which features to delete: the server answered 503"):
            make(tmp_path, wanted)
        up[0] = True
        assert len(Run(make(tmp_path, wanted, resume=True).path).rows(TASK)) == 1


def test_questions_do_not_count_where_nobody_is_asked(package: Path) -> None:
    one, other = (make_tasks.Config(package=str(package), questions=n) for n in (5, 50))
    assert one.identity() == other.identity() and "proposer" not in one.identity()
    with serving(helpful) as server:
        assert config(package, server).identity() != config(package, server, questions=5).identity()


def test_a_plan_says_what_the_proposer_may_cost(package: Path) -> None:
    with serving(helpful) as server:
        plan = make_tasks.plan({}, config(package, server, tasks=3, questions=6))
    assert plan.max_completion_tokens == 6 * 2048 and plan.max_cost_usd == pytest.approx(6 * 2048 * 2e-6)
    assert "features proposed by m, in at most 6 answers" in plan.notes


@pytest.mark.slow
def test_workers_try_what_was_proposed(package: Path, tmp_path: Path) -> None:
    with serving(helpful) as server:
        wanted = config(package, server, tasks=2, questions=6)
        here, there = (Run(make(tmp_path / (on or "here"), wanted, on=on).path) for on in (None, "processes:2"))
    assert there.manifest.content == here.manifest.content and there.manifest.counts == here.manifest.counts
