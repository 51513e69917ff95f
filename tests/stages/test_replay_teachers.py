"""replay-teachers: distinct states once, costs as billed, failures resumable, the verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from stages import replay_teachers
from stages.errors import BadInput, Incomplete, UsageError
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import STEP, TEACHER_ACTION


def endpoint(name: str, url: str, **more: Any) -> dict[str, Any]:
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
    return {"name": name, "model": name, "base_url": url, "max_tokens": 64, **prices, **more}


def replay(root: Path, rollouts: Run, teachers: list[dict[str, Any]], **options: Any) -> Run:
    config = replay_teachers.Config(teachers=teachers)
    return Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root, **options).path)


def test_every_distinct_state_is_asked_once(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected()
    steps = rollouts.rows(STEP)
    distinct = {s["state_sha256"] for s in steps}
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        run = replay(tmp_path, rollouts, [endpoint("one", server.url), endpoint("two", server.url)])
    rows = run.rows(TEACHER_ACTION)
    assert len(distinct) < len(steps)
    assert len(rows) == len(server.requests) == 2 * len(distinct)
    assert sum(r["num_steps"] for r in rows) == 2 * len(steps)
    assert (
        run.manifest.cost_usd == pytest.approx(sum(r["cost_usd"] for r in rows)) == pytest.approx(len(rows) * 15 / 1e6)
    )
    assert run.manifest.summary["verdict"] == "AFFORDABLE"


def test_too_dear_is_said(tmp_path: Path, collected: Callable[..., Run]) -> None:
    with serving(lambda body, n: Reply(body=answer("x", cost=20.0))) as server:
        run = replay(tmp_path, collected(), [endpoint("one", server.url)])
    assert run.manifest.summary["verdict"] == "TOO EXPENSIVE"
    assert "TOO EXPENSIVE" in (run.path / "report.txt").read_text()


def test_failures_are_kept_apart_and_resumed(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts, broken = collected(), [True]

    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(500, {"error": {"message": "down"}}) if broken[0] and n % 2 else Reply(body=answer("x"))

    with serving(reply) as server:
        teachers = [endpoint("one", server.url, max_attempts=1)]
        with pytest.raises(Incomplete, match=r"answers failed, the first of one: .*down"):
            replay(tmp_path, rollouts, teachers)
        asked, broken[0] = len(server.requests), False
        rows = replay(tmp_path, rollouts, teachers, resume=True).rows(TEACHER_ACTION)
    assert all(r["error_type"] is None for r in rows)
    assert len(server.requests) == asked + asked // 2


def test_the_budget_stops_and_resumes_without_paying_twice(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected()
    with serving(lambda body, n: Reply(body=answer("x", cost=1.0))) as server:
        teachers = [endpoint("one", server.url, usd_per_mtok_out=1e6 / 64, concurrency=1)]
        with pytest.raises(Incomplete, match=r"budget of 2\.5 USD"):
            replay(tmp_path, rollouts, teachers, max_cost=2.5)
        assert len(server.requests) == 2
        run = replay(tmp_path, rollouts, teachers, resume=True)
    assert len(server.requests) == len(run.rows(TEACHER_ACTION))
    assert run.manifest.cost_usd == pytest.approx(len(server.requests))


def test_a_local_model_is_a_teacher_too(tmp_path: Path, tiny: Path, collected: Callable[..., Run]) -> None:
    run = replay(tmp_path, collected(), [{"name": "local", "model": str(tiny), "max_tokens": 8}])
    rows = run.rows(TEACHER_ACTION)
    assert rows and all(r["completion_tokens"] > 0 and r["cost_usd"] == 0 for r in rows)


def test_two_teachers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        replay_teachers.Config(teachers=[endpoint("one", "http://x"), endpoint("one", "http://y")])


def test_a_refused_key_stops_at_once(tmp_path: Path, collected: Callable[..., Run]) -> None:
    with (
        serving(lambda body, n: Reply(401, {"error": {"message": "bad key"}})) as server,
        pytest.raises(UsageError, match="key was refused"),
    ):
        replay(tmp_path, collected(), [endpoint("one", server.url, concurrency=1)])


def test_rollouts_are_needed(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        Run(tmp_path)
