"""replay-teachers: distinct states once, costs as billed, failures resumable, the verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine import running
from support.replaying import endpoint, replay
from support.server import Reply, answer, serving

from stages import replay_teachers
from stages.errors import BadInput, Incomplete, UsageError
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import STEP, TEACHER_ACTION


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


@pytest.mark.parametrize("batch", [False, True])
def test_a_model_behind_vllm_is_a_teacher_too(
    tmp_path: Path, tiny: Path, collected: Callable[..., Run], batch: bool
) -> None:
    """Asked by token ids, greedily, beside another; it has no batches, and is asked at once."""
    rollouts = collected()
    local = {"name": "local", "model": str(tiny), "max_tokens": 8}
    with running(tiny) as engine:
        one = {"name": "served", "model": f"vllm:{tiny}", "base_url": engine.url, "max_tokens": 8}
        config = replay_teachers.Config(teachers=[local, one], batch=batch)
        run = Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=tmp_path).path)
    said: dict[str, list[str]] = {}
    for row in run.rows(TEACHER_ACTION):
        said.setdefault(row["teacher"], []).append(row["action"])
    assert said["served"] == said["local"] and said["local"]


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


# --- the gate and the verdict


def verdict(root: Path, rollouts: Run, reply: Callable[[dict[str, Any], int], Reply], **settings: Any) -> Run:
    """replay-teachers with one teacher behind a scripted server."""
    with serving(reply) as server:
        config = replay_teachers.Config(teachers=[endpoint("one", server.url, max_attempts=1)], **settings)
        return Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root).path)


def test_a_server_that_rejects_everything_is_no_success(tmp_path: Path, collected: Callable[..., Run]) -> None:
    run = verdict(tmp_path, collected(), lambda body, n: Reply(400, {"error": {"message": "no such field"}}))
    assert run.manifest.summary["verdict"] == "INVALID-RUN"
    assert (run.manifest.outcome.ok, run.manifest.outcome.exit_code) == (False, 1)
    assert "AFFORDABLE" not in (run.path / "report.txt").read_text()


def test_the_share_of_answers_is_a_gate(tmp_path: Path, collected: Callable[..., Run]) -> None:
    def half(body: dict[str, Any], n: int) -> Reply:
        return Reply(400, {"error": {"message": "no"}}) if n % 2 else Reply(body=answer("x"))

    run = verdict(tmp_path, collected(), half)
    assert (run.manifest.summary["verdict"], run.manifest.outcome.exit_code) == ("TOO FEW ANSWERS", 1)
    passing = verdict(tmp_path / "b", collected(), half, min_answered=0.4)
    assert (passing.manifest.summary["verdict"], passing.manifest.outcome.exit_code) == ("AFFORDABLE", 0)


def test_answers_that_were_cut_off_are_no_answers(tmp_path: Path, collected: Callable[..., Run]) -> None:
    cut = answer("a half")
    cut["choices"][0]["finish_reason"] = "length"
    run = verdict(tmp_path, collected(), lambda body, n: Reply(body=cut))
    assert run.manifest.summary["verdict"] == "INVALID-RUN"
    assert run.manifest.counts["truncated"] == run.manifest.counts["planned"] > 0


@pytest.mark.parametrize(
    ("settings", "word"), [({"max_usd_per_trace": 1e-9}, "TOO EXPENSIVE"), ({"max_p95_latency_s": 1e-6}, "TOO SLOW")]
)
def test_a_verdict_against_going_on_has_an_exit_code(
    tmp_path: Path, collected: Callable[..., Run], settings: dict[str, float], word: str
) -> None:
    run = verdict(tmp_path, collected(), lambda body, n: Reply(body=answer("x")), **settings)
    assert (run.manifest.summary["verdict"], run.manifest.outcome.exit_code) == (word, 1)


def test_an_unknown_price_is_not_zero(tmp_path: Path, collected: Callable[..., Run]) -> None:
    with serving(lambda body, n: Reply(body=answer("x"))) as server:
        teacher = endpoint("one", server.url, usd_per_mtok_in=None, usd_per_mtok_out=None)
        run = replay(tmp_path, collected(), [teacher])
    assert all(row["cost_usd"] is None for row in run.rows(TEACHER_ACTION))
    assert (run.manifest.summary["verdict"], run.manifest.outcome.ok) == ("UNPRICED", None)
    assert "price of one is not known" in (run.path / "report.txt").read_text()


def test_a_step_takes_as_long_as_its_slowest_teacher(tmp_path: Path, collected: Callable[..., Run]) -> None:
    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=answer("x", cost=1.0), delay_s=0.3 if body["model"] == "slow" else 0.0)

    with serving(reply) as server:
        run = replay(tmp_path, collected(), [endpoint("fast", server.url), endpoint("slow", server.url)])
    fast, slow, total = run.manifest.summary["teachers"]
    assert fast["p50_latency_s"] < 0.3 <= slow["p50_latency_s"] == total["p50_latency_s"]
    rows = run.rows(TEACHER_ACTION)
    traces = {row["rollout_id"] for row in collected().rows(STEP)}
    assert total["usd_per_trace"] == pytest.approx(len(rows) / len(traces))
    assert total["p50_usd_per_trace"] <= total["p95_usd_per_trace"]


# --- limits of length and of money


def test_a_teacher_says_how_long_its_answers_may_be() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        replay_teachers.Config(teachers=[{"name": "a", "model": "m", "base_url": "http://x"}])


def test_a_limit_holds_over_all_attempts(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected()
    with serving(lambda body, n: Reply(body=answer("x", cost=1.0))) as server:
        teachers = [endpoint("one", server.url, usd_per_mtok_out=1e6 / 64, concurrency=1)]
        for resume in (False, True, True):
            with pytest.raises(Incomplete, match=r"budget of 2\.5 USD"):
                replay(tmp_path, rollouts, teachers, max_cost=2.5, resume=resume)
    assert len(server.requests) == 2


def test_a_run_that_spent_money_is_not_discarded(tmp_path: Path, collected: Callable[..., Run]) -> None:
    """A time-out, then a refused key: nothing was finished, yet money may have been spent."""

    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(502, {"error": {"message": "lost"}}) if n == 0 else Reply(401, {"error": {"message": "no"}})

    with serving(reply) as server, pytest.raises(UsageError, match="key was refused"):
        replay(tmp_path, collected(), [endpoint("one", server.url, concurrency=1)])
    (folder,) = tmp_path.glob("replay-teachers/2*")
    assert Run(folder).manifest.possibly_usd > 0
