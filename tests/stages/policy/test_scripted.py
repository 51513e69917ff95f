"""`reference` solves every task with its own solution and `noop` none; neither needs a model."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call_process
from support.loopback import Handler, listening
from support.scripted_runs import nothing_done, played

from composer_stages import collect, evaluate
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.policy import kind_of, open_policy, scripted
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import runner
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.ledger import Budget
from composer_stages.runs.run import Inputs, Run

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "kata": {"name": "kata"},
    "gsm8k": {"name": "gsm8k", "path": str(Path(__file__).parents[3] / "examples" / "gsm8k.jsonl")},
}


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_reference_passes_and_noop_fails(tmp_path: Path, env: str) -> None:
    passed = played(tmp_path, "reference", ENVIRONMENTS[env]).rows(ROLLOUT)
    assert [row["reward"] for row in passed] == [1.0] * 6 and all(row["protocol_ok"] for row in passed)
    assert {row["model"] for row in passed} == {"reference"}
    assert len(nothing_done(tmp_path, ENVIRONMENTS[env]).rows(ROLLOUT)) == 6


def test_a_rollout_ends_with_its_solution(tmp_path: Path) -> None:
    """Its one message of two that the environment waits for; the answer is graded as it is."""
    run = played(tmp_path, "reference", {"name": "support.environments:ShortSolutionEnv"})
    rows = run.rows(ROLLOUT)
    assert {(row["reward"], row["terminated_by"], row["num_steps"]) for row in rows} == {(1.0, "idle", 2)}
    assert run.manifest.outcome.ok and nothing_done(tmp_path, {"name": "support.environments:GuessEnv"})


MEANT = "There is no model folder {name!r} here.*`--policy {meant}`"


@pytest.mark.parametrize(("name", "meant"), [("gold", "reference"), ("oracle", "reference"), ("nop", "noop")])
def test_names_of_other_tools_are_refused(name: str, meant: str) -> None:
    with pytest.raises(BadInput, match=MEANT.format(name=name, meant=meant)):
        collect.plan(Inputs(), collect.Config(env={"name": "kata"}, policy={"model": name}))
    with pytest.raises(BadInput, match=MEANT.format(name=name, meant=meant)):
        evaluate.STAGE.plan(Inputs(), evaluate.Config(env={"name": "kata"}, policies={"B": {"model": name}}))


@pytest.mark.parametrize(
    ("name", "kind", "at_server"), [("noop", "scripted", "scripted"), ("gold", "local", "endpoint")]
)
def test_base_url_is_ignored_by_scripted_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, at_server: str
) -> None:
    """A settings file gives one address for all stages, and `noop` was then asked of that server."""
    served = PolicyConfig(model=name, base_url="http://127.0.0.1:1/v1")
    assert (kind_of(PolicyConfig(model=name)), kind_of(served)) == (kind, at_server)
    assert (served.identity() == PolicyConfig(model=name).identity()) is (kind == at_server), "one run, not two"
    scripted.check(served, "kata")
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert kind_of(PolicyConfig(model=name)) == "local"
    scripted.check(PolicyConfig(model=name), "kata")


@pytest.mark.slow
def test_other_tools_names_are_refused_without_a_request_to_the_hub(tmp_path: Path) -> None:
    requests: list[str] = []

    class Counting(Handler):
        def get(self) -> None:
            requests.append(self.path)
            self.send(404, {})

        do_HEAD = get  # noqa: N815

    with listening(Counting) as hub:
        env = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
        done = call_process(tmp_path, "collect", "--env", "kata", "--policy", "gold", **env)
        assert done.returncode == 4 and not requests
        assert re.fullmatch(f"{MEANT.format(name='gold', meant='reference')}.*\n", done.stderr), done.stderr
        call_process(tmp_path, "collect", "--env", "kata", "--policy", "golden", **env)
        assert requests, "a model of any other name is looked for at this hub"


def test_scripted_policies_are_arms_of_an_evaluation(tmp_path: Path) -> None:
    policies = {"A": {"model": "noop"}, "B": {"model": "reference"}}
    env = {"name": "support.environments:ShortSolutionEnv"}
    config = evaluate.Config(env=env, policies=policies, control=None, tasks=16)
    run = Run(runner.execute("evaluate", {}, config, root=tmp_path).path)
    assert run.manifest.summary["verdict"] == "PARTIAL" and "+100.0 points" in run.manifest.summary["why"]


def test_an_environment_without_solutions_is_refused_before_the_start() -> None:
    config = collect.Config(env={"name": "support.environments:GuessEnv"}, policy={"model": "reference"})
    with pytest.raises(UsageError, match="has no solutions for the policy 'reference' to play"):
        collect.plan(Inputs(), config)
    evaluated = evaluate.Config(env={"name": "support.environments:GuessEnv"}, policies={"B": {"model": "reference"}})
    with pytest.raises(UsageError, match="has no solutions"):
        evaluate.STAGE.plan(Inputs(), evaluated)
    assert collect.plan(Inputs(), collect.Config(env=config.env, policy={"model": "noop"})).units == 100


def test_a_task_without_a_solution_has_no_reward_and_a_reason(tmp_path: Path) -> None:
    env = {"name": "support.environments:HalfSolvedEnv"}
    with pytest.raises(Incomplete, match="has no solution"):
        played(tmp_path, "reference", env)
    rows = Run(next((tmp_path / "reference" / "collect").glob("2*"))).rows(ROLLOUT)
    assert sorted(str(row["reward"]) for row in rows) == ["1.0"] * 4 + ["None"] * 2


def test_tool_calls_are_refused_for_scripted_policies() -> None:
    config = PolicyConfig(model="reference", tool_calls="qwen3")
    with pytest.raises(UsageError, match="plays actions as text"):
        open_policy(config, cache=Path(), budget=Budget(None), listener=lambda what, done, total: None)
