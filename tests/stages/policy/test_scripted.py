"""`reference` solves every task with its own solution and `noop` none; neither needs a model."""

from pathlib import Path
from typing import Any

import pytest

from stages import collect, evaluate
from stages.errors import Incomplete, UsageError
from stages.policy import kind_of, open_policy
from stages.policy.base import PolicyConfig
from stages.runs import runner
from stages.runs.artifact import Inputs, Run
from stages.runs.ledger import Budget
from stages.runs.records import ROLLOUT

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "kata": {"name": "kata"},
    "gsm8k": {"name": "gsm8k", "path": str(Path(__file__).parents[3] / "examples" / "gsm8k.jsonl")},
}


def played(root: Path, policy: str, env: dict[str, Any], **more: Any) -> Run:
    """Collect six rollouts of a policy, the same model for all."""
    config = collect.Config(env=env, policy={"model": policy}, tasks=3, samples=2, **more)
    return Run(runner.execute("collect", {}, config, root=root / policy).path)


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_solutions_pass_and_nothing_does_not(tmp_path: Path, env: str) -> None:
    passed = played(tmp_path, "reference", ENVIRONMENTS[env]).rows(ROLLOUT)
    assert [row["reward"] for row in passed] == [1.0] * 6 and all(row["protocol_ok"] for row in passed)
    assert {row["model"] for row in passed} == {"reference"}
    failed = played(tmp_path, "noop", ENVIRONMENTS[env]).rows(ROLLOUT)
    assert [row["reward"] for row in failed] == [0.0] * 6


def test_they_are_arms_of_an_evaluation(tmp_path: Path) -> None:
    policies = {"A": {"model": "noop"}, "B": {"model": "reference"}}
    config = evaluate.Config(env={"name": "kata"}, policies=policies, control=None, tasks=40)
    run = Run(runner.execute("evaluate", {}, config, root=tmp_path).path)
    assert run.manifest.summary["verdict"] == "PARTIAL" and "+100.0 points" in run.manifest.summary["why"]


def test_an_environment_without_solutions_is_refused_before_the_start() -> None:
    config = collect.Config(env={"name": "support.environments:GuessEnv"}, policy={"model": "reference"})
    with pytest.raises(UsageError, match="has no solutions for the policy 'reference' to play"):
        collect.plan(Inputs(), config)
    evaluated = evaluate.Config(env={"name": "support.environments:GuessEnv"}, policies={"B": {"model": "reference"}})
    with pytest.raises(UsageError, match="has no solutions"):
        evaluate.plan(Inputs(), evaluated)
    assert collect.plan(Inputs(), collect.Config(env=config.env, policy={"model": "noop"})).units == 100


def test_a_task_without_a_solution_has_no_reward_and_a_reason(tmp_path: Path) -> None:
    env = {"name": "support.environments:HalfSolvedEnv"}
    with pytest.raises(Incomplete, match="has no solution"):
        played(tmp_path, "reference", env)
    rows = Run(next((tmp_path / "reference" / "collect").glob("2*"))).rows(ROLLOUT)
    assert sorted(str(row["reward"]) for row in rows) == ["1.0"] * 4 + ["None"] * 2


def test_a_folder_or_a_servers_model_may_have_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(PolicyConfig(model="noop")) == "scripted"
    assert kind_of(PolicyConfig(model="noop", base_url="http://127.0.0.1:1/v1")) == "endpoint"
    (tmp_path / "noop").mkdir()
    monkeypatch.chdir(tmp_path)
    assert kind_of(PolicyConfig(model="noop")) == "local"


def test_calls_are_refused() -> None:
    config = PolicyConfig(model="reference", tool_calls="qwen3")
    with pytest.raises(UsageError, match="plays actions as text"):
        open_policy(config, cache=Path(), budget=Budget(None), listener=lambda what, done, total: None)
