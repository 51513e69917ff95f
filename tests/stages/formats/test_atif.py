"""ATIF documents: steps, copied context, token ids, sub-agents, and Harbor's verdict beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import action, document, jsonl, payloads, read

from composer_stages.comparison import logs
from composer_stages.rollouts import missing


def called(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_call_id": call_id, "function_name": "bash", "arguments": arguments}


def results(*pairs: tuple[str | None, Any]) -> dict[str, Any]:
    return {"results": [{"source_call_id": source, "content": content} for source, content in pairs]}


ACTION = {
    "step_id": 3,
    "timestamp": "2026-01-01T00:00:04Z",
    "source": "agent",
    "message": "I look.",
    "reasoning_content": "hm",
    "tool_calls": [called("a", command="ls"), called("b", command="pwd")],
    "observation": results(("b", "/work"), ("a", [{"type": "text", "text": "a.py"}]), (None, "beware")),
    "metrics": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cost_usd": 0.5,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [4, 5],
        "logprobs": [-0.1, -0.2],
    },
}
STEPS = [
    {"step_id": 1, "timestamp": "2026-01-01T00:00:00Z", "source": "system", "message": "You fix."},
    {"step_id": 2, "source": "user", "message": "Fix it."},
    ACTION,
    {"step_id": 4, "source": "agent", "message": "Done.", "metrics": {"prompt_tokens": 9, "completion_tokens": 1}},
]
RESULT = {"task_name": "hello-world", "trial_name": "t__1", "source": "tb", "exception_info": None}


def atif(steps: list[dict[str, Any]] = STEPS, **more: Any) -> dict[str, Any]:
    agent = {"name": "terminus-2", "version": "1", "model_name": "m", "tool_definitions": [{"type": "function"}]}
    metrics = {"total_prompt_tokens": 12, "total_completion_tokens": 3, "total_cost_usd": 0.5}
    about = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "final_metrics": metrics}
    return {**about, "steps": steps, **more}


def test_steps_are_opening_and_turns(tmp_path: Path) -> None:
    (rollout,), drops, _ = read(document(tmp_path / "trajectory.json", atif()))
    calls = (("bash", json.dumps({"command": command})) for command in ("ls", "pwd"))
    assert [m["role"] for m in rollout.opening] == ["system", "user"] and not drops
    assert rollout.turns[0].action == action("I look.", *calls, thought="hm")
    observed = [("tool", "a.py"), ("tool", "/work"), ("user", "beware")]
    assert [(m["role"], m["content"]) for m in rollout.turns[0].observed] == observed
    assert (rollout.model, rollout.prompt_tokens, rollout.cost_usd, rollout.wall_s) == ("m", 12, 0.5, 4.0)
    assert (rollout.tools, rollout.reward) == ([{"type": "function"}], None)
    assert rollout.extra["agent"] == "terminus-2 1"


def test_token_ids_reach_the_rows(tmp_path: Path) -> None:
    (row,) = payloads(document(tmp_path / "trajectory.json", atif([*STEPS[:3]])))
    (step,) = row["steps"]
    assert (step["capture_level"], step["prompt_delta_token_ids"]) == ("tokens", [1, 2, 3])
    assert (step["completion_token_ids"], step["logprobs"]) == ([4, 5], [-0.1, -0.2])
    assert missing.TOKENS not in row["origin"]["missing"] and missing.REWARD in row["origin"]["missing"]


def test_copied_steps_and_steps_without_a_model_are_context(tmp_path: Path) -> None:
    copied = [{**step, "is_copied_context": True} for step in STEPS]
    steps = [*copied, {"source": "agent", "message": "Auto.", "llm_call_count": 0}, {**STEPS[3], "message": "New."}]
    (rollout,), _, _ = read(document(tmp_path / "trajectory.cont-1.json", atif(steps)))
    assert [turn.action for turn in rollout.turns] == ["New."]
    roles = ["system", "user", "assistant", "tool", "tool", "user", "assistant", "assistant"]
    assert [m["role"] for m in rollout.opening] == roles


@pytest.mark.parametrize("place", ["agent/trajectory.json", "trajectory.json"])
@pytest.mark.parametrize(
    ("rewards", "reward", "resolved"),
    [({"reward": 1.0}, 1.0, True), ({"tests": 0}, 0.0, False), ({"reward": 0.5, "f2p": 1}, 0.5, None)],
)
def test_harbors_result_gives_the_verdict(
    tmp_path: Path, place: str, rewards: dict[str, float], reward: float, resolved: bool | None
) -> None:
    file = document(tmp_path / "trial" / place, atif())
    document(tmp_path / "trial" / "result.json", {**RESULT, "verifier_result": {"rewards": rewards}})
    for path in (tmp_path, file):
        (rollout,), drops, _ = read(path)
        assert (rollout.task_id, rollout.env) == ("hello-world", "tb") and not drops
        assert (rollout.reward, rollout.resolved) == (reward, resolved) and missing.REWARD not in rollout.missing


def raised(kind: str, message: str, **more: Any) -> dict[str, Any]:
    return {"exception_info": {"exception_type": kind, "exception_message": message, **more}}


def test_an_exception_is_an_error_only_without_a_verdict(tmp_path: Path) -> None:
    for name, verdict in (("a", None), ("b", {"rewards": {"reward": 0.0}})):
        document(tmp_path / name / "agent" / "trajectory.json", atif(session_id=name))
        result = {**RESULT, "verifier_result": verdict, **raised("AgentTimeoutError", "20 s")}
        document(tmp_path / name / "result.json", result)
    (failed, timed_out), _, _ = read(tmp_path)
    assert failed.error == ("AgentTimeoutError", "20 s") and failed.reward is None
    assert (timed_out.error, timed_out.reward, timed_out.terminated_by) == (None, 0.0, "AgentTimeoutError")


INVALID = {"has_valid_reward": False}


@pytest.mark.parametrize("with_trajectory", [True, False])
@pytest.mark.parametrize(
    ("recorded", "error"),
    [
        (raised("ApiUsageLimitError", "no"), "ApiUsageLimitError"),
        # A trial of several steps records what a step ended in there, with what Harbor makes of it.
        ({"step_results": [raised("TimeoutError", ""), raised("ApiError", "no", policy=INVALID)]}, "ApiError"),
        ({}, "invalid_reward"),
    ],
)
def test_a_reward_that_harbor_marks_invalid_is_ignored(
    tmp_path: Path, recorded: dict[str, Any], error: str, with_trajectory: bool
) -> None:
    """Harbor itself counts it nowhere; no report of the folder judges the rollout in its place."""
    result = {**RESULT, "trial_name": "t", "verifier_result": {"rewards": {"reward": 1.0}}, "reward_valid": False}
    document(tmp_path / "t" / "result.json", {**result, **recorded})
    document(tmp_path / "report.json", {"resolved_ids": [RESULT["task_name"]], "unresolved_ids": []})
    if with_trajectory:
        document(tmp_path / "t" / "agent" / "trajectory.json", atif())
    (rollout,), _, _ = read(tmp_path)
    assert rollout.error is not None and rollout.error[0] == error
    assert (rollout.reward, rollout.resolved, len(rollout.turns) > 0) == (None, None, with_trajectory)
    document(tmp_path / "t" / "result.json", {**result, **recorded, "reward_valid": True})
    (valid,), _, _ = read(tmp_path)
    assert (valid.reward, valid.resolved, valid.error) == (1.0, True, None)


def test_sub_agents_are_rollouts_without_a_verdict(tmp_path: Path) -> None:
    inner = atif(session_id="s", trajectory_id="inner", steps=STEPS[1:])
    document(tmp_path / "t" / "agent" / "trajectory.json", atif(subagent_trajectories=[inner]))
    document(tmp_path / "t" / "result.json", {**RESULT, "verifier_result": {"rewards": {"reward": 1.0}}})
    main, side = read(tmp_path)[0]
    assert (main.reward, side.reward, side.extra["subagent"]) == (1.0, None, True)
    assert side.own_id is not None and side.own_id.startswith("inner/") and side.own_id != main.own_id


def test_a_trial_is_one_item_whatever_its_agent_left(tmp_path: Path) -> None:
    """Summaries of Terminus 2, a continuation, a session of Claude Code, and what the agent made."""
    agent = tmp_path / "job" / "t" / "agent"
    document(agent.parent / "result.json", {**RESULT, "verifier_result": {"rewards": {"reward": 1.0}}})
    for name in ("trajectory.json", "trajectory.cont-1.json", "trajectory.summarization-1-summary.json"):
        document(agent / name, atif(session_id=name))
    spoken = {"type": "user", "uuid": "u", "sessionId": "s", "message": {"role": "user", "content": "Fix it."}}
    answered = {**spoken, "type": "assistant", "uuid": "a", "parentUuid": "u"}
    jsonl(agent / "sessions" / "s.jsonl", spoken, answered | {"message": {"id": "m", "content": "Done."}})
    jsonl(agent.parent / "artifacts" / "tsconfig.json", "// no JSON")
    (agent.parent / "artifacts" / "made.tar.gz").write_bytes(b"\x1f\x8b\xff")
    rollouts, _, _ = read(tmp_path / "job")
    rewards = {rollout.extra["session"]: rollout.reward for rollout in rollouts}
    assert rewards == {
        "trajectory.json": 1.0,
        "trajectory.cont-1.json": 1.0,
        "trajectory.summarization-1-summary.json": None,
    }
    assert logs.read(str(tmp_path / "job")).items["task"].to_pylist() == ["hello-world"]
    for file in agent.glob("trajectory*.json"):
        file.unlink()
    (only,) = read(tmp_path / "job")[0]
    assert (only.env, only.task_id, only.reward) == ("tb", "hello-world", 1.0), "the only transcript"
    assert logs.read(str(tmp_path / "job")).scores["reward"].to_pylist() == [1.0]


@pytest.mark.parametrize(
    "broken",
    [{"steps": [5]}, {"steps": [{"message": "x"}]}, {"steps": [{**ACTION, "tool_calls": [{}]}]}, {"agent": "terminus"}],
)
def test_malformed_documents_are_dropped(tmp_path: Path, broken: dict[str, Any]) -> None:
    rollouts, drops, _ = read(document(tmp_path / "trajectory.json", {**atif(), **broken}))
    assert not rollouts and [drop.reason for drop in drops] == ["malformed_record"]


def test_deeply_nested_sub_agents_are_dropped(tmp_path: Path) -> None:
    deep = atif()
    for _ in range(300):
        deep = atif(subagent_trajectories=[deep])
    rollouts, drops, _ = read(document(tmp_path / "trajectory.json", deep, indent=None))
    assert not rollouts and drops[0].reason == "too_deep"
