"""collect: rows, collection checks, and rollouts that fail for reasons that are not the policy's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving

from composer_stages import collect
from composer_stages.errors import Incomplete, InfrastructureError
from composer_stages.rollouts.trace import by_rollout, prompt_ids, states
from composer_stages.runs import runner
from composer_stages.runs.kinds import ROLLOUT, STEP, TASK
from composer_stages.runs.run import Inputs, Run, read_manifest


def test_rows_are_complete_and_pass_the_collection_checks(collected: Callable[..., Run]) -> None:
    run = collected()
    rollouts, steps, tasks = run.rows(ROLLOUT), run.rows(STEP), run.rows(TASK)
    assert len(tasks) == 3 and len(rollouts) == 6
    assert len(steps) == sum(r["num_steps"] for r in rollouts)
    assert all(r["sandbox"] == "not-needed" and r["source"] == "collect" for r in rollouts)
    rewards = {r["rollout_id"]: r["reward"] for r in rollouts}
    for rollout, taken in by_rollout(steps).items():
        assert [s["reward"] for s in taken] == [0.0] * (len(taken) - 1) + [rewards[rollout]]
    exact = ("state hash chain", "ids as many as log-probs", "prompt extends the last", "tuples complete")
    assert all(len(set(run.manifest.summary["collection_checks"][name][:2])) == 1 for name in exact)


def test_states_and_ids_are_rebuilt_from_deltas(collected: Callable[..., Run]) -> None:
    for steps in by_rollout(collected().rows(STEP)).values():
        assert [len(state) for state in states(steps)] == [row["num_messages"] for row in steps]
        ids = prompt_ids(steps)
        for before, after, row in zip(ids, ids[1:], steps, strict=False):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + len(row["completion_token_ids"])] == row["completion_token_ids"]


def settings(model: Path | str, env: str = "GuessEnv", url: str | None = None, **more: Any) -> collect.Config:
    """Settings of a collection in a scripted environment, by a model here or on a server."""
    policy = {"model": str(model), "base_url": url, "max_tokens": 80}
    return collect.Config(env={"name": f"support.environments:{env}"}, policy=policy, **{"tasks": 2, **more})


@pytest.mark.parametrize(
    ("env", "error", "ended"),
    [("BreakingEnv", r"2 of 4 rollouts failed.*the sandbox is gone", 2), ("NeverGradedEnv", "4 of 4 .*no grader", 4)],
)
def test_what_the_machinery_broke_has_no_reward_and_is_never_zero(
    tmp_path: Path, tiny: Path, env: str, error: str, ended: int
) -> None:
    with pytest.raises(Incomplete, match=error):
        runner.execute("collect", {}, settings(tiny, env, samples=2), root=tmp_path)
    path = next((tmp_path / "collect").glob("2*"))
    assert read_manifest(path).status == "incomplete"
    rows = Run(path).rows(ROLLOUT)
    assert [row["reward"] is None for row in rows] == [i < ended for i in range(4)]
    assert {row["error_type"] for row in rows[:ended]} == {"InfrastructureError"}
    assert {row["terminated_by"] for row in rows[:ended]} == {"env_error"}


@pytest.mark.parametrize(("max_steps", "end"), [(1, "; 2 of 2 ended by max_steps=1"), (2, "mean reward 1.000")])
def test_a_server_is_a_policy_and_rollouts_that_the_limit_of_steps_ended_are_counted(
    tmp_path: Path, max_steps: int, end: str
) -> None:
    with serving(lambda body, number: Reply(body=answer(body["messages"][0]["content"][-1]))) as server:
        config = settings("m", url=server.url, samples=1, max_steps=max_steps)
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    assert (run.path / "report.txt").read_text().splitlines()[0].endswith(end)
    absent = ("completion_token_ids", "logprobs")
    assert all(row["capture_level"] == "text" and not any(row[name] for name in absent) for row in run.rows(STEP))
    assert run.manifest.outcome.ok and [row["reward"] for row in run.rows(ROLLOUT)] == [1.0, 1.0]


def test_a_paid_rollout_is_not_paid_again_after_a_failure(tmp_path: Path) -> None:
    fail = [True]

    def reply(body: dict, n: int) -> Reply:
        last = body["messages"][0]["content"] == "say b"
        return Reply(400, {"error": {"message": "no"}}) if fail[0] and last else Reply(body=answer("a"))

    with serving(reply) as server:
        config = settings("m", url=server.url, samples=1)
        with pytest.raises(Incomplete):
            runner.execute("collect", {}, config, root=tmp_path)
        before, fail[0] = len(server.requests), False
        runner.execute("collect", {}, config, root=tmp_path, resume=True)
    assert before == 3 and len(server.requests) == 5


@pytest.mark.parametrize(
    ("how", "asked"),
    [({"resume": True}, 1), ({}, 2), ({"clean": True}, 2), ({"out": "elsewhere"}, 2)],
    ids=["resumed", "begun again", "clean", "another run"],
)
def test_what_a_free_server_answered_is_of_its_run_alone(tmp_path: Path, how: dict[str, Any], asked: int) -> None:
    """Another model is behind the address by then, of which no other run may get an answer of the first."""
    loaded, credit = ["a first"], [1]

    def reply(body: dict, n: int) -> Reply:
        return Reply(body=answer(loaded[0])) if n < credit[0] else Reply(402, {"error": {"message": "no"}})

    with serving(reply) as server:
        config = settings("m", url=server.url, env="EndlessGuessEnv", tasks=1, samples=1, max_steps=2)
        with pytest.raises(InfrastructureError):
            runner.execute("collect", {}, config, root=tmp_path)
        before, loaded[0], credit[0] = len(server.requests), "a second", 9
        where = {"out": tmp_path / "elsewhere"} if "out" in how else {}
        run = Run(runner.execute("collect", {}, config, root=tmp_path, **{**how, **where}).path)
    assert len(server.requests) - before == asked
    assert [row["action"] for row in run.rows(STEP)] == [*["a first"] * (2 - asked), *["a second"] * asked]
    assert not (run.path / "scratch").exists()


def test_a_plan_says_what_limits_a_rollout_and_what_goes_on_at_once() -> None:
    policy = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}
    limits = {"wall_s": 600, "context_tokens": 32_000, "cost_usd": 0.5}
    config = collect.Config(policy=policy, limits=limits, history="last 5")
    notes = ", ".join(collect.plan(Inputs({}), config).notes)
    assert all(limit in notes for limit in ("8 steps", "600 s", "32,000 tokens", "0.5 USD", "last 5"))
    assert "64 rollouts, 8 commands and 4 gradings at once" in notes
    assert "at once" not in ", ".join(collect.plan(Inputs({}), collect.Config()).notes)


def test_the_manifest_says_how_many_tasks_are_left_out(tmp_path: Path) -> None:
    names = [(f"Write f, {number}.", "1" if number % 2 else "Node(1)") for number in range(20)]
    rows = [json.dumps({"prompt": text, "tests": [f"assert f({given}) == 1"]}) for text, given in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    env = {"name": "code", "path": str(tmp_path / "rows.jsonl")}
    config = collect.Config(policy={"model": "noop"}, env=env, tasks=2, samples=1)
    left_out = Run(runner.execute("collect", {}, config, root=tmp_path).path).manifest.summary["left_out"]
    assert " left out, " in left_out and "it calls Node" in left_out
