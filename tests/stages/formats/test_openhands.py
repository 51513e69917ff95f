"""OpenHands outputs of versions 0 and 1, of pairs, and of the resolver."""

from pathlib import Path
from typing import Any

from needs import REAL, needs
from support.transcripts import INSTANCE, PATCH, call, jsonl, payloads, read

from stages.rollouts import missing


def row(history: Any, **more: Any) -> dict[str, Any]:
    about = {"agent_class": "CodeActAgent", "llm_config": {"model": "some/model"}}
    return {
        "instance_id": INSTANCE,
        "instruction": "Fix it.",
        "instance": {"problem_statement": "It breaks."},
        "metadata": about,
        "metrics": {"accumulated_cost": 0.3, "accumulated_token_usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        "test_result": {"git_patch": PATCH},
        "error": None,
        "history": history,
        **more,
    }


def replied(*calls: dict[str, Any]) -> dict[str, Any]:
    message = {"content": "I look.", "role": "assistant", "tool_calls": list(calls)}
    response = {
        "id": "r1",
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1},
    }
    return {"function_name": "execute_bash", "tool_call_id": calls[0]["id"], "model_response": response}


def test_events_of_version_0(tmp_path: Path) -> None:
    metadata = replied(call("execute_bash", '{"command": "ls"}'), call("execute_bash", '{"command": "pwd"}', "call_2"))
    history = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "You fix."}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it."}},
        {"id": 2, "source": "user", "action": "recall", "args": {"query": "Fix it."}},
        {"id": 3, "source": "environment", "observation": "recall", "content": "Added"},
        {"id": 4, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": metadata},
        {
            "id": 5,
            "source": "agent",
            "observation": "run",
            "content": "a.py",
            "extras": {"metadata": {"exit_code": 0}},
            "tool_call_metadata": metadata,
        },
        {"id": 6, "source": "agent", "action": "finish", "args": {"thought": "Done.", "outputs": {}}},
    ]
    (one,), drops, _ = read(jsonl(tmp_path / "output.jsonl", row(history)))
    assert [m["role"] for m in one.opening] == ["system", "user"] and len(one.turns) == 2 and not drops
    assert one.turns[0].action.count("<tool_call>") == 2 and one.turns[0].finish_reason == "tool_calls"
    assert (one.turns[0].returncode, one.turns[0].commands, one.turns[0].prompt_tokens) == (0, ["ls"], 5)
    assert one.turns[1].action == 'Done.\n<tool_call>\n{"name": "finish", "arguments": {"outputs": {}}}\n</tool_call>'
    assert (one.model, one.submission, one.statement, one.completion_tokens) == ("some/model", PATCH, "It breaks.", 2)


def test_events_of_version_1_with_parallel_calls(tmp_path: Path) -> None:
    def acted(name: str, call_id: str) -> dict[str, Any]:
        spoke = [{"type": "text", "text": "I look."}] if call_id == "1" else []
        tool_call = {"id": call_id, "name": name, "arguments": '{"a":  1}', "origin": "completion"}
        return {
            "kind": "ActionEvent",
            "thought": spoke,
            "tool_call": tool_call,
            "tool_name": name,
            "llm_response_id": "r1",
            "source": "agent",
        }

    history = [
        {"kind": "SystemPromptEvent", "system_prompt": {"type": "text", "text": "You fix."}, "source": "agent"},
        {
            "kind": "MessageEvent",
            "llm_message": {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
            "source": "user",
        },
        {"kind": "ConversationStateUpdateEvent", "key": "x", "value": 1},
        *(acted("terminal", "1"), acted("editor", "2")),
        {
            "kind": "ObservationEvent",
            "observation": {"kind": "T", "content": [{"type": "text", "text": "a.py"}], "exit_code": 1},
            "tool_name": "terminal",
        },
        {"kind": "AgentErrorEvent", "error": "no such tool", "tool_name": "editor"},
        {
            "kind": "MessageEvent",
            "llm_message": {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
            "source": "agent",
        },
    ]
    (one,), _, _ = read(jsonl(tmp_path / "output.jsonl", row(history)))
    assert [turn.action for turn in one.turns] == [
        'I look.\n<tool_call>\n{"name": "terminal", "arguments": {"a":  1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "editor", "arguments": {"a":  1}}\n</tool_call>',
        "Done.",
    ]
    assert [m["content"] for m in one.turns[0].observed] == ["a.py", "no such tool"] and one.turns[0].returncode == 1
    assert [m["content"] for m in one.opening] == ["You fix.", "Fix it."]


def test_pairs_of_2024_and_their_result(tmp_path: Path) -> None:
    history = [
        [
            {"source": "user", "action": "message", "args": {"content": "Fix it."}},
            {"observation": "null", "content": ""},
        ],
        [
            {"source": "agent", "action": "run", "args": {"command": "ls", "thought": "I look."}},
            {"observation": "run", "content": "a.py", "extras": {"exit_code": 0}},
        ],
    ]
    record = {
        **row(history),
        "test_result": {"result": True},
        "metadata": {"model_name": "gpt-4o", "dataset": "ProntoQA"},
    }
    (one,), _, _ = read(jsonl(tmp_path / "output.jsonl", record))
    assert (one.reward, one.resolved, one.model, one.turns[0].returncode) == (1.0, None, "gpt-4o", 0)


def test_the_resolvers_flat_history_opens_with_the_user_and_its_opinion_is_no_reward(tmp_path: Path) -> None:
    history = [
        {"action": "message", "content": "Fix it.", "wait_for_response": False},
        {"action": "run", "command": "ls", "thought": "I look.", "keep_prompt": True},
        {"observation": "run", "content": "a.py", "exit_code": 0},
    ]
    record = {
        "issue": {"owner": "o", "repo": "r", "number": 5, "body": "It breaks."},
        "git_patch": PATCH,
        "instruction": "Fix it.",
        "success": True,
        "history": history,
    }
    (one,) = payloads(jsonl(tmp_path / "output.jsonl", record))
    assert one["rollout"]["reward"] is None and missing.REWARD in one["origin"]["missing"]
    assert one["rollout"]["task_id"] == "o/r#5" and one["origin"]["submission"] == PATCH
    assert (
        one["steps"][0]["action"]
        == 'I look.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
    )


def test_a_row_without_history_is_a_failed_rollout(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "output.jsonl", row(None, error="RuntimeError: no container")))
    assert one["rollout"]["error"] == "RuntimeError: no container" and one["rollout"]["num_steps"] == 0


@needs("real")
def test_real_files() -> None:
    found, drops, _ = read(REAL / "trajectories" / "openhands")
    assert len(found) == 11 and not drops and sum(len(one.turns) for one in found) == 154
    assert [one.reward for one in found if one.env == "ProntoQA"].count(None) == 0
