"""verifiers: results before 0.4 (tasks, calls in JSON text, failed runs), traces of 0.4 (branches, token deltas)."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import assistant, call, document, jsonl, payloads, read, system, tool, user

from composer_stages.messages import ToolCall, read as parts_of
from composer_stages.rollouts import missing
from composer_stages.rollouts.trace import prompt_ids

SEARCH = '{"query":  "Utsuro-bune", "top": 3}'


def row(**more: Any) -> dict[str, Any]:
    searched = assistant("", tool_calls=[json.dumps(call("search", SEARCH))])
    completion = [searched, tool("found"), assistant("Hollow ship", tool_calls=None)]
    record = {"id": 0, "prompt": [system("Help."), user("What?")], "completion": completion}
    return {**record, "answer": "Hollow ship", "reward": 1.0, "task": "default", **more}


def test_calls_keep_their_arguments_to_the_letter(tmp_path: Path) -> None:
    document(tmp_path / "metadata.json", {"env_id": "wiki", "model": "m", "sampling_args": {"max_tokens": 5}})
    (rollout,), drops, _ = read(jsonl(tmp_path / "results.jsonl", row(total_ms=1500.0)))
    assert parts_of(rollout.turns[0].action).calls == (ToolCall("search", SEARCH),)
    assert rollout.turns[0].observed == [tool("found")] and rollout.turns[1].action == "Hollow ship"
    assert (rollout.env, rollout.model, rollout.wall_s) == ("wiki", "m", 1.5)
    assert rollout.sampling == {"max_tokens": 5} and not drops


def test_a_task_is_its_question_and_answer_whatever_the_id_and_the_system_prompt(tmp_path: Path) -> None:
    bare = row(id=7, prompt=[user("What?")])
    second = row(answer="Something else")
    rollouts, _, _ = read(jsonl(tmp_path / "results.jsonl", row(), bare, second))
    assert rollouts[0].task_id == rollouts[1].task_id != rollouts[2].task_id


def test_an_empty_completion_has_no_reward(tmp_path: Path) -> None:
    (payload,) = payloads(jsonl(tmp_path / "results.jsonl", row(completion=[], reward=0.0)))
    expected = {"reward": None, "error_type": "empty_completion"}
    assert payload["rollout"] | expected == payload["rollout"] and payload["steps"] == []


def test_a_base_model_has_text_on_both_sides(tmp_path: Path) -> None:
    (rollout,), _, _ = read(jsonl(tmp_path / "results.jsonl", row(prompt="It was", completion=" dark.")))
    assert rollout.opening[0]["content"] == "It was" and [turn.action for turn in rollout.turns] == [" dark."]


def test_newer_columns_give_tokens_ends_and_errors(tmp_path: Path) -> None:
    messages = [assistant("a", reasoning_content="hm", tool_calls=[{"id": "1", "name": "f", "arguments": "{}"}])]
    tokens = {"prompt_ids": [1], "completion_ids": [2, 3], "completion_logprobs": [-0.1, -0.2]}
    truncated = row(completion=messages, is_truncated=True, stop_condition="max_turns", trajectory=[{"tokens": tokens}])
    failed = row(error={"error": "ToolError", "message": "broken"}, is_truncated=False)
    first, second = payloads(jsonl(tmp_path / "results.jsonl", truncated, failed))
    assert first["steps"][0]["truncated"] is True and first["steps"][0]["completion_token_ids"] == [2, 3]
    assert first["steps"][0]["action"].startswith("<think>\nhm\n</think>\n\na\n<tool_call>")
    assert (first["rollout"]["terminated_by"], second["rollout"]["error_type"]) == ("max_turns", "ToolError")
    assert second["rollout"]["reward"] is None


def test_facts_that_a_result_lacks_are_listed_as_missing(tmp_path: Path) -> None:
    (payload,) = payloads(jsonl(tmp_path / "wiki--some--model" / "run1" / "results.jsonl", row()))
    assert {missing.TOKENS, missing.LOGPROBS, missing.FINISH, missing.USAGE} <= set(payload["origin"]["missing"])
    assert payload["steps"][0]["truncated"] is None and payload["rollout"]["completion_tokens"] is None
    assert (payload["rollout"]["env"], payload["rollout"]["model"]) == ("wiki", "some/model")


def node(role: str, content: str, parent: int | None = None, **more: Any) -> dict[str, Any]:
    fields = {"message": {"role": role, "content": content}, "sampled": role == "assistant", **more}
    return fields if parent is None else {"parent": parent, **fields}


def trace(nodes: list[dict[str, Any]], trace_id: str = "t1", **more: Any) -> dict[str, Any]:
    task = {"type": "Sum", "data": {"idx": 3, "prompt": "1+1?", "answer": "2"}, "key": "sum/3", "hash": "h"}
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.2}}
    fields = {"agent": {"config": {}}, "rewards": rewards, "ok": True, "is_completed": True}
    return {"version": 1, "id": trace_id, "task": task, "nodes": nodes, **fields, **more}


def episode(*traces: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = {"type": "Sum", "data": {"idx": 3, "prompt": "1+1?"}, "key": "sum/3"}
    about = {"id": "e1", "env": {"id": "sums", "name": "sums-train"}, "task": task, "ok": True}
    return {**about, "traces": list(traces), **more}


def tokens(ids: list[int], mask: list[bool], logprobs: list[float] | None = None) -> dict[str, Any]:
    return {"token_ids": ids, "mask": mask, "logprobs": logprobs or []}


TALK = [
    node("user", "1+1?", **tokens([1, 2], [False, False])),
    node("assistant", "3", 0, **tokens([9, 5, 6], [False, True, True], [-0.5, -0.0])),
    node("user", "no", 1, **tokens([7], [False])),
    node("assistant", "2", 2, **tokens([9, 8], [False, True], [-1.0])),
]


def test_an_episode_and_a_bare_trace_give_the_same_steps(tmp_path: Path) -> None:
    calls = [{"node": 1, "model": "m", "finish_reason": "stop", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]
    (complete,), _, _ = read(jsonl(tmp_path / "a" / "traces.jsonl", episode(trace(TALK, calls=calls))))
    (bare,), _, _ = read(jsonl(tmp_path / "b" / "traces.jsonl", trace(TALK, calls=calls)))
    assert complete.turns == bare.turns and complete.opening == bare.opening == [user("1+1?")]
    assert [turn.action for turn in complete.turns] == ["3", "2"] and complete.turns[0].observed[0]["content"] == "no"
    fields = (complete.task_id, complete.own_id, complete.model, complete.statement)
    assert fields == ("sums-train/sum/3", "t1", "m", "1+1?") and complete.reward == pytest.approx(0.7)
    first, second = complete.turns
    assert (first.finish_reason, first.prompt_tokens, second.prompt_tokens) == ("stop", 3, None)


def test_token_ids_are_those_of_the_whole_path(tmp_path: Path) -> None:
    (payload,) = payloads(jsonl(tmp_path / "traces.jsonl", episode(trace(TALK))))
    steps = payload["steps"]
    assert prompt_ids(steps) == [[1, 2, 9], [1, 2, 9, 5, 6, 7, 9]]
    assert [s["completion_token_ids"] for s in steps] == [[5, 6], [8]]
    assert [s["logprobs"] for s in steps] == [[-0.5, -0.0], [-1.0]] and all(s["prefix_ok"] for s in steps)
    assert {s["capture_level"] for s in steps} == {"tokens"}
    assert missing.EXACT_LOGPROBS in payload["origin"]["missing"] and missing.TOKENS not in payload["origin"]["missing"]


def test_an_evaluation_without_tokens_lists_them_as_missing(tmp_path: Path) -> None:
    nodes = [node("user", "q", token_ids=[], mask=[]), node("assistant", "a", 0, token_ids=[], mask=[])]
    (payload,) = payloads(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    step = payload["steps"][0]
    assert step["capture_level"] == "text" and step["completion_token_ids"] is None and step["logprobs"] is None
    assert {missing.TOKENS, missing.LOGPROBS} <= set(payload["origin"]["missing"])


def test_a_shared_action_is_a_step_of_one_branch_only(tmp_path: Path) -> None:
    nodes = [
        *(node("user", "q", **tokens([1], [False])), node("assistant", "a", 0, **tokens([2], [True], [-1.0]))),
        *(node("user", "x", 1), node("assistant", "left", 2), node("user", "y", 1), node("assistant", "right", 4)),
    ]
    rollouts, drops, _ = read(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    assert [[turn.action for turn in rollout.turns] for rollout in rollouts] == [["a", "right"], ["left"]]
    assert [rollout["content"] for rollout in rollouts[1].opening] == ["q", "a", "x"] and not drops
    assert [rollout.own_id for rollout in rollouts] == ["t1", "t1/3"]


def test_a_branch_without_new_actions_is_dropped(tmp_path: Path) -> None:
    nodes = [node("user", "q"), node("assistant", "a", 0), node("user", "dangling", 1)]
    nodes += [node("user", "y", 1), node("assistant", "b", 3)]
    rollouts, drops, _ = read(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    assert len(rollouts) == 1 and [drop.reason for drop in drops] == ["branch_without_actions"]


def test_unscored_is_null_and_failed_is_an_error(tmp_path: Path) -> None:
    failed = episode(id="e2", ok=False, errors=[{"type": "Timeout", "message": "too slow"}])
    unscored = trace(TALK, "t2", rewards={"right": None})
    errs = trace(TALK, "t3", ok=False, errors=[{"type": "ToolError", "message": "broken"}])
    never = trace(TALK, "t4", rewards={})
    found = payloads(jsonl(tmp_path / "traces.jsonl", failed, unscored, errs, never))
    errors = [(row["rollout"]["error_type"], row["rollout"]["num_steps"]) for row in found]
    assert errors == [("Timeout", 0), (None, 2), ("ToolError", 2), (None, 2)]
    assert {row["rollout"]["reward"] for row in found} == {None}
    assert [missing.REWARD in row["origin"]["missing"] for row in found] == [False, False, False, True]


def test_a_circular_trace_is_a_malformed_record(tmp_path: Path) -> None:
    looping = trace([node("user", "q", 1), node("assistant", "a", 0), node("user", "end", 1)])
    rollouts, drops, _ = read(jsonl(tmp_path / "traces.jsonl", looping, trace(TALK)))
    assert len(rollouts) == 1 and drops[0].reason == "malformed_record" and drops[0].line == 1


def test_the_folder_says_whether_an_episode_entered_a_batch(tmp_path: Path) -> None:
    for subset in ("all", "effective"):
        jsonl(tmp_path / "step_1" / "train" / subset / "traces.jsonl", episode(trace(TALK)))
    rollouts, _, _ = read(tmp_path)
    assert [rollout.effective for rollout in rollouts] == [False, True]
