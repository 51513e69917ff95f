"""OpenHands outputs of versions 0 and 1, of pairs, and of the resolver."""

from pathlib import Path
from typing import Any

import pytest
from support.transcripts import INSTANCE, PATCH, action, call, document, jsonl, payloads, read

from composer_stages.comparison import logs
from composer_stages.formats.measurement import State
from composer_stages.rollouts import missing


def row(history: Any, **more: Any) -> dict[str, Any]:
    task = {"instance_id": INSTANCE, "instruction": "Fix it.", "instance": {"problem_statement": "It breaks."}}
    usage = {"accumulated_cost": 0.3, "accumulated_token_usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    about = {"metadata": {"agent_class": "CodeActAgent", "llm_config": {"model": "some/model"}}, "metrics": usage}
    return {**task, **about, "test_result": {"git_patch": PATCH}, "error": None, "history": history, **more}


def replied(*calls: dict[str, Any]) -> dict[str, Any]:
    message = {"content": "I look.", "role": "assistant", "tool_calls": list(calls)}
    choices, usage = [{"message": message, "finish_reason": "tool_calls"}], {"prompt_tokens": 5, "completion_tokens": 1}
    response = {"id": "r1", "choices": choices, "usage": usage}
    return {"function_name": "execute_bash", "tool_call_id": calls[0]["id"], "model_response": response}


def event(source: str, kind: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An action of version 0."""
    return {"source": source, "action": kind, "args": args, **more}


def test_events_of_version_0(tmp_path: Path) -> None:
    request = replied(call("execute_bash", '{"command": "ls"}'), call("execute_bash", '{"command": "pwd"}', "call_2"))
    seen = {"observation": "run", "content": "a.py", "extras": {"metadata": {"exit_code": 0}}}
    history = [
        event("agent", "system", {"content": "You fix."}),
        event("user", "message", {"content": "Fix it."}),
        event("user", "recall", {"query": "Fix it."}),
        {"source": "environment", "observation": "recall", "content": "Added"},
        event("agent", "run", {"command": "ls"}, tool_call_metadata=request),
        {"source": "agent", **seen, "tool_call_metadata": request},
        event("agent", "finish", {"thought": "Done.", "outputs": {}}),
    ]
    for number, entry in enumerate(history):
        entry["id"] = number
    (entry,), drops, _ = read(jsonl(tmp_path / "output.jsonl", row(history)))
    assert [m["role"] for m in entry.opening] == ["system", "user"] and len(entry.turns) == 2 and not drops
    assert entry.turns[0].action.count("<tool_call>") == 2 and entry.turns[0].finish_reason == "tool_calls"
    assert (entry.turns[0].returncode, entry.turns[0].commands, entry.turns[0].prompt_tokens) == (0, ["ls"], 5)
    assert entry.turns[1].action == action("Done.", ("finish", '{"outputs": {}}'))
    assert (entry.model, entry.submission, entry.statement) == ("some/model", PATCH, "It breaks.")
    assert entry.completion_tokens == 2


def test_events_of_version_1_with_parallel_calls(tmp_path: Path) -> None:
    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    def said(role: str, words: str, source: str) -> dict[str, Any]:
        return {"kind": "MessageEvent", "llm_message": {"role": role, "content": [text(words)]}, "source": source}

    def acted(name: str, call_id: str, *thought: dict[str, Any]) -> dict[str, Any]:
        tool_call = {"id": call_id, "name": name, "arguments": '{"a":  1}', "origin": "completion"}
        about = {"kind": "ActionEvent", "tool_name": name, "llm_response_id": "r1", "source": "agent"}
        return {**about, "thought": list(thought), "tool_call": tool_call}

    seen = {"kind": "T", "content": [text("a.py")], "exit_code": 1}
    history = [
        {"kind": "SystemPromptEvent", "system_prompt": text("You fix."), "source": "agent"},
        said("user", "Fix it.", "user"),
        {"kind": "ConversationStateUpdateEvent", "key": "x", "value": 1},
        *(acted("terminal", "1", text("I look.")), acted("editor", "2")),
        {"kind": "ObservationEvent", "observation": seen, "tool_name": "terminal"},
        {"kind": "AgentErrorEvent", "error": "no such tool", "tool_name": "editor"},
        said("assistant", "Done.", "agent"),
    ]
    (entry,), _, _ = read(jsonl(tmp_path / "output.jsonl", row(history)))
    calls = (("terminal", '{"a":  1}'), ("editor", '{"a":  1}'))
    assert [turn.action for turn in entry.turns] == [action("I look.", *calls), "Done."]
    assert [m["content"] for m in entry.turns[0].observed] == ["a.py", "no such tool"]
    assert entry.turns[0].returncode == 1
    assert [m["content"] for m in entry.opening] == ["You fix.", "Fix it."]


def test_pairs_of_2024_and_their_result(tmp_path: Path) -> None:
    request = [event("user", "message", {"content": "Fix it."}), {"observation": "null", "content": ""}]
    seen = {"observation": "run", "content": "a.py", "extras": {"exit_code": 0}}
    history = [request, [event("agent", "run", {"command": "ls", "thought": "I look."}), seen]]
    about = {"test_result": {"result": True}, "metadata": {"model_name": "gpt-4o", "dataset": "ProntoQA"}}
    (entry,), _, _ = read(jsonl(tmp_path / "output.jsonl", row(history, **about)))
    assert (entry.reward, entry.resolved, entry.model, entry.turns[0].returncode) == (1.0, None, "gpt-4o", 0)


def test_the_resolvers_flat_history_opens_with_the_user_and_its_opinion_is_no_reward(tmp_path: Path) -> None:
    history = [
        {"action": "message", "content": "Fix it.", "wait_for_response": False},
        {"action": "run", "command": "ls", "thought": "I look.", "keep_prompt": True},
        {"observation": "run", "content": "a.py", "exit_code": 0},
    ]
    issue = {"owner": "o", "repo": "r", "number": 5, "body": "It breaks."}
    record = {"issue": issue, "git_patch": PATCH, "instruction": "Fix it.", "success": True, "history": history}
    (payload,) = payloads(jsonl(tmp_path / "output.jsonl", record))
    assert payload["rollout"]["reward"] is None and missing.REWARD in payload["origin"]["missing"]
    assert payload["rollout"]["task_id"] == "o/r#5" and payload["origin"]["submission"] == PATCH
    assert payload["steps"][0]["action"] == action("I look.", ("run", '{"command": "ls"}'))


def test_a_row_without_history_is_a_failed_rollout(tmp_path: Path) -> None:
    (payload,) = payloads(jsonl(tmp_path / "output.jsonl", row(None, error="RuntimeError: no container")))
    assert payload["rollout"]["error"] == "RuntimeError: no container" and payload["rollout"]["num_steps"] == 0


@pytest.mark.parametrize(
    ("others", "resolved"),
    [
        (["output.critic_attempt_1.jsonl", "output.critic_attempt_2.jsonl", ".ipynb_checkpoints/output.jsonl"], [None]),
        (["output.swebench_eval.jsonl"], [True]),
        (["other.jsonl"], [True, None]),
    ],
)
def test_attempts_and_judged_copies_of_a_file_count_once(
    tmp_path: Path, others: list[str], resolved: list[bool | None]
) -> None:
    jsonl(
        tmp_path / "output.jsonl", row([event("user", "message", {"content": "Fix."}), event("agent", "x", {"a": 0})])
    )
    for number, name in enumerate(others):
        history = [event("user", "message", {"content": "Fix it."}), event("agent", "run", {"command": f"ls {number}"})]
        jsonl(tmp_path / name, row(history, report={"resolved": True}))
    rollouts, _, _ = read(tmp_path)
    assert [rollout.resolved for rollout in rollouts] == resolved
    assert len(logs.read(str(tmp_path)).items) == len(resolved)


@pytest.mark.parametrize("place", ["the record", "a report beside it"])
def test_a_verdict_counts_whatever_ended_the_agent(tmp_path: Path, place: str) -> None:
    """OpenHands writes the agent's last error beside the verdict: at its limit of steps a patch may be right."""
    history = [event("user", "message", {"content": "q"}), event("agent", "run", {"command": "ls", "thought": ""})]
    told = {"report": {"resolved": True}} if place == "the record" else {}
    line = row(history, error="RuntimeError: Agent reached maximum iteration.", **told)
    path = jsonl(tmp_path / "output.jsonl", line)
    if not told:
        document(tmp_path / "report.json", {"resolved_ids": [INSTANCE]})
    (rollout,), _, _ = read(tmp_path)
    (payload,) = payloads(path)
    assert rollout.measured.state == State.SCORED_WITH_ERROR and "maximum iteration" in rollout.measured.reason
    assert payload["rollout"]["reward"] == 1.0 and payload["rollout"]["error_type"] is None


@pytest.mark.parametrize(
    ("result", "score"),
    [
        ({"success": 0.92, "final_message": "x"}, 0.92),
        ({"success": 0, "ground_truth": "y"}, 0.0),
        ({"score": True, "model_answer": "3"}, 1.0),
        ({"reward": 0.5}, 0.5),
        ({"passed": False, "rewards": {"reward": 0.0}}, 0.0),
        ({"exit_code": 0, "test_cases": "x"}, 1.0),
        ({"exit_code": 1, "test_cases": "x"}, 0.0),
        ({"eval_result": {"passed": 0.5, "num_tests": 2}}, 0.5),
        ({"final_score": {"result": 1, "total": 4}}, 0.25),
        ({"git_patch": PATCH}, None),
        ({"result": "a text"}, None),
        ({"fraction_won": 0.5}, None),
    ],
)
def test_each_benchmark_has_its_own_verdict(tmp_path: Path, result: dict[str, Any], score: float | None) -> None:
    """A fraction counted as no score beside failures that did, and verdicts of other names were not read."""
    history = [event("user", "message", {"content": "q"}), event("agent", "run", {"command": "ls", "thought": ""})]
    jsonl(tmp_path / "output.jsonl", row(history, instance_id="a-1", test_result=result))
    (rollout,), _, _ = read(tmp_path)
    assert rollout.reward == score
    if score is None and "git_patch" not in result:
        assert next(iter(result)) in rollout.measured.reason


def test_an_error_without_an_instruction_is_a_failed_rollout(tmp_path: Path) -> None:
    jsonl(tmp_path / "output.jsonl", {"instance_id": "sk-1", "error": "boom", "test_result": {}})
    (rollout,), _, _ = read(tmp_path)
    assert rollout.error == ("error", "boom") and rollout.reward is None
