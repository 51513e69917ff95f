"""NeMo Gym rollouts: Responses items, groups, rebuilt openings, tokens, masked rollouts."""

from pathlib import Path
from typing import Any

from support.transcripts import INSTANCE, PATCH, jsonl, payloads, read, user

from composer_stages.rollouts import missing

ASKED = [{"type": "message", "role": "system", "content": "Help."}, user("1+1?")]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def called(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


def shown(output: Any, call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "output": output, "call_id": call_id}


def row(*output: Any, messages: Any = ASKED, **more: Any) -> dict[str, Any]:
    response = {"model": "some/model", "output": list(output), "status": None}
    response["usage"] = {"input_tokens": 0, "output_tokens": 0}
    request = {"input": messages, "temperature": 0.6, "tools": []}
    return {"responses_create_params": request, "response": response, "reward": 1.0, **more}


def test_items_become_turns(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": None}
    calls = (called("python", '{"code":  "1+1"}', "a"), called("python", '{"code": "2"}', "b"))
    output = (thought, said("I compute."), *calls, shown("2", "a"), shown({"out": 2}, "b"), said("It is 2."))
    (rollout,), drops, _ = read(jsonl(tmp_path / "sums.rollouts.jsonl.gz", row(*output)))
    assert [m["role"] for m in rollout.opening] == ["system", "user"] and len(rollout.turns) == 2 and not drops
    assert rollout.turns[0].action.startswith("<think>\nhm\n</think>\n\nI compute.\n<tool_call>")
    assert '"arguments": {"code":  "1+1"}' in rollout.turns[0].action
    assert rollout.turns[0].action.count("<tool_call>") == 2
    assert [m["content"] for m in rollout.turns[0].observed] == ["2", '{"out": 2}'] and rollout.env == "sums"
    assert (rollout.reward, rollout.model) == (1.0, "some/model")
    assert rollout.prompt_tokens is None, "zero usage means none recorded"


def test_members_of_a_group_share_a_task_and_a_masked_one_has_no_reward(tmp_path: Path) -> None:
    masked = row(said("b"), mask_sample=True, error_kind="timeout", reward=0.0)
    other = row(said("c"), messages=[user("2+2?")])
    first, second, third = payloads(jsonl(tmp_path / "x.jsonl", row(said("a")), masked, other))
    assert first["rollout"]["group_id"] == second["rollout"]["group_id"] != third["rollout"]["group_id"]
    assert (second["rollout"]["reward"], second["rollout"]["error_type"]) == (None, "timeout")


def test_an_unrecorded_request_is_rebuilt_from_the_description(tmp_path: Path) -> None:
    record = row(said("I fix."), messages=[], model_patch=PATCH, resolved=False, reward=0.0)
    record["responses_create_params"]["metadata"] = {"instance_id": INSTANCE, "problem_statement": "It breaks."}
    record["instance_config"] = {"agent_kwargs": {"system_prompt": "You fix."}}
    (payload,) = payloads(jsonl(tmp_path / "x.jsonl", record))
    assert missing.OPENING in payload["origin"]["missing"] and payload["origin"]["submission"] == PATCH
    assert (payload["rollout"]["task_id"], payload["rollout"]["hidden_pass"]) == (INSTANCE, False)
    assert payload["task"]["prompt"] == "It breaks." and payload["steps"][0]["num_messages"] == 2


def test_tokens_on_an_item_are_those_of_its_call(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    (payload,) = payloads(jsonl(tmp_path / "x.jsonl", row(said("a", **ids))))
    assert (payload["steps"][0]["capture_level"], payload["steps"][0]["completion_token_ids"]) == ("tokens", [3])


def test_other_shapes_of_rows(tmp_path: Path) -> None:
    cut = row(said("a"), messages="1+1?")
    cut["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    talk = row(user("hi", type="message"), said("a"), user("more"), said("b"), messages=[])
    first = [user("hi"), called("f", "{}", "a")]
    transitions = row(first, [*first, said("b")], messages=[], task_idx=4)
    rollouts, drops, _ = read(jsonl(tmp_path / "x.jsonl", cut, talk, transitions, row()))
    assert rollouts[0].turns[0].finish_reason == "length" and rollouts[0].opening == [user("1+1?")]
    assert len(rollouts[1].turns) == 2 and rollouts[1].opening == [user("hi")]
    assert len(rollouts[2].turns) == 2 and rollouts[2].task_id.endswith("/task-4")
    assert rollouts[3].error is not None and rollouts[3].error[0] == "no_actions" and not drops
