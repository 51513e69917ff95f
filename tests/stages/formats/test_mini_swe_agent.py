"""mini-swe-agent trajectories of both versions, in their three dialects."""

from pathlib import Path
from typing import Any

from support.transcripts import INSTANCE, PATCH, action, assistant, call, document, payloads, read, system, tool, user

from composer_stages.rollouts import missing

ASKED = "<pr_description>\nConsider the following PR description:\nIt breaks.\n</pr_description>\nNow fix it."


def trajectory(*messages: dict[str, Any], **info: Any) -> dict[str, Any]:
    config = {"model": {"model_name": "some/model", "model_kwargs": {"temperature": 0.0}}}
    fields = {"exit_status": "Submitted", "submission": PATCH, "model_stats": {"instance_cost": 0.5, "api_calls": 2}}
    spoken = [system("You fix."), user(ASKED), *messages]
    about = {"info": {"mini_version": "1.15.0", "config": config, **fields, **info}, "messages": spoken}
    return {**about, "trajectory_format": "mini-swe-agent-1", "instance_id": INSTANCE}


def said(command: str, **extra: Any) -> dict[str, Any]:
    return assistant(f"THOUGHT: look\n\n```bash\n{command}\n```", extra=extra)


def test_text_actions_of_version_1(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 4, "cost": 0.1}
    first = said("ls", response={"choices": [{"finish_reason": "stop"}], "usage": usage})
    output = user("<returncode>1</returncode>\n<output>\nno\n</output>")
    cut = user("<returncode>0</returncode>\n<elided_chars>\n120 characters elided\n</elided_chars>")
    messages = (first, output, said("cat x"), cut, assistant("no block"))
    path = document(tmp_path / "a.traj.json", trajectory(*messages))
    (rollout,), drops, _ = read(path)
    assert (rollout.task_id, rollout.family, rollout.env) == (INSTANCE, "owner/repo", "swe-bench")
    assert (rollout.model, rollout.statement, rollout.submission) == ("some/model", "It breaks.", PATCH)
    assert (rollout.terminated_by, rollout.cost_usd) == ("submitted", 0.5)
    first, second, third = rollout.turns
    assert (first.commands, first.returncode, first.finish_reason, first.prompt_tokens) == (["ls"], 1, "stop", 10)
    assert (second.elided_chars, first.elided_chars) == (120, 0)
    assert third.parse_error == "expected one action, found 0" and first.parse_error is None and not drops


def test_the_reasoning_of_the_raw_reply_is_part_of_the_action(tmp_path: Path) -> None:
    fields = {"choices": [{"message": {"content": "ls it", "reasoning": "hm"}}]}
    twice = {"choices": [{"message": {"content": "x", "reasoning_content": "ha", "reasoning": "ha"}}]}
    path = document(tmp_path / "a.traj.json", trajectory(said("ls", response=fields), said("cat", response=twice)))
    (rollout,), _, _ = read(path)
    thoughts = [turn.action.partition("\n\nTHOUGHT")[0] for turn in rollout.turns]
    assert thoughts == ["<think>\nhm\n</think>", "<think>\nha\n</think>"]
    assert [turn.commands for turn in rollout.turns] == [["ls"], ["cat"]]


def test_reward_comes_from_a_report_beside_it_or_is_not_recorded(tmp_path: Path) -> None:
    document(tmp_path / "x.traj.json", trajectory(said("ls")))
    (unjudged,) = payloads(tmp_path / "x.traj.json")
    assert unjudged["rollout"]["reward"] is None and missing.REWARD in unjudged["origin"]["missing"]
    document(tmp_path / "x.report.json", {"patch_exists": True, "resolved": False})
    (judged,) = payloads(tmp_path / "x.traj.json")
    assert (judged["rollout"]["reward"], judged["rollout"]["hidden_pass"]) == (0.0, False)
    assert missing.REWARD not in judged["origin"]["missing"]


def test_tool_calls_of_version_2_and_the_lost_message_of_a_format_error(tmp_path: Path) -> None:
    ran = {"actions": [{"command": "ls"}], "cost": 0.2}
    good = assistant(None, tool_calls=[call("bash", '{"command": "ls"}')], extra=ran)
    output = tool("a.py", tool_call_id="call_1", extra={"raw_output": "a.py", "returncode": 0})
    lost = {"choices": [{"message": assistant("I think."), "finish_reason": "length"}], "usage": {}}
    error = user("No tool calls found.", extra={"interrupt_type": "FormatError", "response": lost})
    end = {"role": "exit", "content": PATCH, "extra": {"exit_status": "Submitted"}}
    (rollout,), _, _ = read(document(tmp_path / "b.traj.json", trajectory(good, output, error, end)))
    assert [turn.commands for turn in rollout.turns] == [["ls"], []]
    assert rollout.turns[0].raw_chars == 4 and rollout.turns[0].cost_usd == 0.2 and rollout.turns[0].parse_error is None
    lost_turn = rollout.turns[1]
    assert (lost_turn.action, lost_turn.finish_reason) == ("I think.", "length") and lost_turn.parse_error
    assert [m["content"] for m in lost_turn.observed] == ["No tool calls found."]


def test_responses_objects_of_version_2(tmp_path: Path) -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
    ]
    usage = {"input_tokens": 7, "output_tokens": 3}
    response = {"object": "response", "status": "completed", "output": output, "usage": usage}
    answered = {**response, "extra": {"actions": [{"command": "ls"}]}}
    shown = {"type": "function_call_output", "call_id": "c1", "output": "a.py", "extra": {"returncode": 0}}
    (rollout,), _, _ = read(document(tmp_path / "c.traj.json", trajectory(answered, shown)))
    turn = rollout.turns[0]
    assert turn.action == action("I look.", ("bash", '{"command": "ls"}'), thought="hm")
    assert turn.observed == [tool("a.py")] and turn.completion_tokens == 3


def test_token_ids_and_log_probs_of_the_raw_reply(tmp_path: Path) -> None:
    logprobs = {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}
    choice = {"finish_reason": "stop", "token_ids": [4, 5], "logprobs": logprobs}
    raw = {"choices": [choice], "prompt_token_ids": [1, 2, 3]}
    (payload,) = payloads(document(tmp_path / "d.traj.json", trajectory(said("ls", response=raw))))
    step = payload["steps"][0]
    assert (step["capture_level"], step["prompt_len"], step["completion_token_ids"]) == ("tokens", 3, [4, 5])


def test_a_bare_list_of_messages_is_a_trajectory(tmp_path: Path) -> None:
    messages = [user("do"), assistant("```mswea_bash_command\nls\n```")]
    (rollout,), _, _ = read(document(tmp_path / f"{INSTANCE}.traj.json", messages))
    assert rollout.task_id == INSTANCE and rollout.turns[0].commands == ["ls"] and rollout.model is None
