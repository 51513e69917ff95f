"""collect: rows, gate, and rollouts that fail for reasons that are not the policy's."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.server import Reply, answer, serving

from stages import collect
from stages.errors import Incomplete
from stages.rollouts.trace import by_rollout, prompt_ids, states
from stages.runs import runner
from stages.runs.kinds import ROLLOUT, STEP, TASK
from stages.runs.run import Inputs, Run, read_manifest


def test_rows_are_complete_and_pass_the_gate(collected: Callable[..., Run]) -> None:
    run = collected()
    rollouts, steps, tasks = run.rows(ROLLOUT), run.rows(STEP), run.rows(TASK)
    assert len(tasks) == 3 and len(rollouts) == 6
    assert len(steps) == sum(r["num_steps"] for r in rollouts)
    assert all(r["sandbox"] == "not-needed" and r["source"] == "collect" for r in rollouts)
    assert set(run.manifest.summary["gate"]) >= {
        "state hash chain",
        "ids as many as log-probs",
        "prompt extends the last",
    }
    exact = ("state hash chain", "ids as many as log-probs", "prompt extends the last", "tuples complete")
    assert all(len(set(run.manifest.summary["gate"][name])) == 1 for name in exact)


def test_states_and_ids_are_rebuilt_from_deltas(collected: Callable[..., Run]) -> None:
    for steps in by_rollout(collected().rows(STEP)).values():
        assert [len(state) for state in states(steps)] == [row["num_messages"] for row in steps]
        ids = prompt_ids(steps)
        for before, after, row in zip(ids, ids[1:], steps, strict=False):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + len(row["completion_token_ids"])] == row["completion_token_ids"]


def test_the_reward_stands_on_the_last_step(collected: Callable[..., Run]) -> None:
    run = collected()
    rewards = {r["rollout_id"]: r["reward"] for r in run.rows(ROLLOUT)}
    for rollout, steps in by_rollout(run.rows(STEP)).items():
        assert [s["reward"] for s in steps] == [0.0] * (len(steps) - 1) + [rewards[rollout]]


def test_a_broken_machine_is_null_and_retried(tmp_path: Path, tiny: Path) -> None:
    config = collect.Config(
        env={"name": "support.environments:BreakingEnv"},
        policy={"model": str(tiny), "max_tokens": 80},
        tasks=2,
        samples=2,
    )
    with pytest.raises(Incomplete, match=r"2 of 4 rollouts failed.*the sandbox is gone"):
        runner.execute("collect", {}, config, root=tmp_path)
    path = next((tmp_path / "collect").glob("2*"))
    assert read_manifest(path).status == "incomplete"
    rows = Run(path).rows(ROLLOUT)
    assert [r["reward"] is None for r in rows] == [True, True, False, False]
    assert rows[0]["error_type"] == "InfrastructureError" and rows[0]["terminated_by"] == "env_error"


def test_no_grade_is_null_and_never_zero(tmp_path: Path, tiny: Path) -> None:
    config = collect.Config(
        env={"name": "support.environments:NeverGradedEnv"},
        policy={"model": str(tiny), "max_tokens": 80},
        tasks=1,
        samples=1,
    )
    with pytest.raises(Incomplete):
        runner.execute("collect", {}, config, root=tmp_path)
    assert Run(next((tmp_path / "collect").glob("2*"))).rows(ROLLOUT)[0]["reward"] is None


def test_a_server_is_a_policy_too(tmp_path: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("aaa"))) as server:
        config = collect.Config(
            env={"name": "support.environments:GuessEnv"},
            policy={"model": "m", "base_url": server.url},
            tasks=2,
            samples=2,
        )
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    steps = run.rows(STEP)
    assert all(
        s["capture_level"] == "text" and s["completion_token_ids"] is None and s["logprobs"] is None for s in steps
    )
    assert run.manifest.outcome.ok
    assert [r["reward"] for r in run.rows(ROLLOUT)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("max_steps", "said"), [(1, "; 2 of 2 ended by max_steps=1\n"), (2, "mean reward 1.000\n")])
def test_the_report_says_how_many_rollouts_the_limit_of_steps_ended(tmp_path: Path, max_steps: int, said: str) -> None:
    with serving(lambda body, number: Reply(body=answer(body["messages"][0]["content"][-1]))) as server:
        policy = {"model": "m", "base_url": server.url, "max_tokens": 64}
        guess = {"name": "support.environments:GuessEnv"}
        config = collect.Config(env=guess, policy=policy, tasks=2, samples=1, max_steps=max_steps)
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    assert said in (run.path / "report.txt").read_text().partition("\n")[0] + "\n"


def test_a_paid_rollout_is_not_paid_again_after_a_failure(tmp_path: Path) -> None:
    fail = [True]

    def reply(body: dict, n: int) -> Reply:
        last = body["messages"][0]["content"] == "say b"
        return Reply(400, {"error": {"message": "no"}}) if fail[0] and last else Reply(body=answer("a"))

    with serving(reply) as server:
        config = collect.Config(
            env={"name": "support.environments:GuessEnv"},
            policy={"model": "m", "base_url": server.url},
            tasks=2,
            samples=1,
        )
        with pytest.raises(Incomplete):
            runner.execute("collect", {}, config, root=tmp_path)
        before, fail[0] = len(server.requests), False
        runner.execute("collect", {}, config, root=tmp_path, resume=True)
    assert before == 3 and len(server.requests) == 5


def test_a_plan_says_what_limits_a_rollout_and_what_goes_on_at_once() -> None:
    config = collect.Config(
        policy={"model": "m", "base_url": "http://127.0.0.1:1/v1"},
        limits={"wall_s": 600, "context_tokens": 32_000, "cost_usd": 0.5},
        history="last 5",
    )
    told = ", ".join(collect.plan(Inputs({}), config).notes)
    assert (
        "8 steps, 600 s, 32,000 tokens of context, 0.5 USD, an answer at most" in told
        and "leaves, history last 5" in told
    )
    assert "64 rollouts, 8 commands and 4 gradings at once" in told
    assert "at once" not in ", ".join(collect.plan(Inputs({}), collect.Config()).notes)
