"""verifiers: results before 0.4 (tasks, calls in JSON text, failed runs), traces of 0.4 (branches, token deltas)."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import assistant, call, document, jsonl, payloads, read, system, tool, user

from stages.messages import ToolCall, read as parts_of
from stages.rollouts import missing
from stages.rollouts.trace import prompt_ids

SEARCH = '{"query":  "Utsuro-bune", "top": 3}'


def row(**more: Any) -> dict[str, Any]:
    searched = assistant("", tool_calls=[json.dumps(call("search", SEARCH))])
    completion = [searched, tool("found"), assistant("Hollow ship", tool_calls=None)]
    said = {"id": 0, "prompt": [system("Help."), user("What?")], "completion": completion}
    return {**said, "answer": "Hollow ship", "reward": 1.0, "task": "default", **more}


def test_calls_keep_their_arguments_to_the_letter(tmp_path: Path) -> None:
    document(tmp_path / "metadata.json", {"env_id": "wiki", "model": "m", "sampling_args": {"max_tokens": 5}})
    (one,), drops, _ = read(jsonl(tmp_path / "results.jsonl", row(total_ms=1500.0)))
    assert parts_of(one.turns[0].action).calls == (ToolCall("search", SEARCH),)
    assert one.turns[0].observed == [{"role": "tool", "content": "found"}] and one.turns[1].action == "Hollow ship"
    assert (one.env, one.model, one.wall_s, one.sampling) == ("wiki", "m", 1.5, {"max_tokens": 5}) and not drops


def test_a_task_is_its_question_and_answer_whatever_the_id_and_the_system_prompt(tmp_path: Path) -> None:
    bare = row(id=7, prompt=[user("What?")])
    other = row(answer="Something else")
    found, _, _ = read(jsonl(tmp_path / "results.jsonl", row(), bare, other))
    assert found[0].task_id == found[1].task_id != found[2].task_id


def test_a_completion_that_never_came_has_no_reward(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "results.jsonl", row(completion=[], reward=0.0)))
    assert (one["rollout"]["reward"], one["rollout"]["error_type"], one["steps"]) == (None, "empty_completion", [])


def test_a_base_model_has_text_on_both_sides(tmp_path: Path) -> None:
    (one,), _, _ = read(jsonl(tmp_path / "results.jsonl", row(prompt="It was", completion=" dark.")))
    assert one.opening[0]["content"] == "It was" and [turn.action for turn in one.turns] == [" dark."]


def test_newer_columns_give_tokens_ends_and_errors(tmp_path: Path) -> None:
    said = [assistant("a", reasoning_content="hm", tool_calls=[{"id": "1", "name": "f", "arguments": "{}"}])]
    tokens = {"prompt_ids": [1], "completion_ids": [2, 3], "completion_logprobs": [-0.1, -0.2]}
    truncated = row(completion=said, is_truncated=True, stop_condition="max_turns", trajectory=[{"tokens": tokens}])
    failed = row(error={"error": "ToolError", "message": "broken"}, is_truncated=False)
    first, second = payloads(jsonl(tmp_path / "results.jsonl", truncated, failed))
    assert first["steps"][0]["truncated"] is True and first["steps"][0]["completion_token_ids"] == [2, 3]
    assert first["steps"][0]["action"].startswith("<think>\nhm\n</think>\n\na\n<tool_call>")
    assert (first["rollout"]["terminated_by"], second["rollout"]["error_type"]) == ("max_turns", "ToolError")
    assert second["rollout"]["reward"] is None


def test_what_the_file_cannot_tell_is_named(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "wiki--some--model" / "run1" / "results.jsonl", row()))
    assert {missing.TOKENS, missing.LOGPROBS, missing.FINISH, missing.USAGE} <= set(one["origin"]["missing"])
    assert one["steps"][0]["truncated"] is None and one["rollout"]["completion_tokens"] is None
    assert (one["rollout"]["env"], one["rollout"]["model"]) == ("wiki", "some/model")


def node(role: str, content: str, parent: int | None = None, **more: Any) -> dict[str, Any]:
    found = {"message": {"role": role, "content": content}, "sampled": role == "assistant", **more}
    return found if parent is None else {"parent": parent, **found}


def trace(nodes: list[dict[str, Any]], trace_id: str = "t1", **more: Any) -> dict[str, Any]:
    task = {"type": "Sum", "data": {"idx": 3, "prompt": "1+1?", "answer": "2"}, "key": "sum/3", "hash": "h"}
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.2}}
    told = {"agent": {"config": {}}, "rewards": rewards, "ok": True, "is_completed": True}
    return {"version": 1, "id": trace_id, "task": task, "nodes": nodes, **told, **more}


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
    (whole,), _, _ = read(jsonl(tmp_path / "a" / "traces.jsonl", episode(trace(TALK, calls=calls))))
    (bare,), _, _ = read(jsonl(tmp_path / "b" / "traces.jsonl", trace(TALK, calls=calls)))
    assert whole.turns == bare.turns and whole.opening == bare.opening == [user("1+1?")]
    assert [turn.action for turn in whole.turns] == ["3", "2"] and whole.turns[0].observed[0]["content"] == "no"
    told = (whole.task_id, whole.own_id, whole.model, whole.statement)
    assert told == ("sums-train/sum/3", "t1", "m", "1+1?") and whole.reward == pytest.approx(0.7)
    first, second = whole.turns
    assert (first.finish_reason, first.prompt_tokens, second.prompt_tokens) == ("stop", 3, None)


def test_token_ids_are_those_of_the_whole_path(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "traces.jsonl", episode(trace(TALK))))
    steps = one["steps"]
    assert prompt_ids(steps) == [[1, 2, 9], [1, 2, 9, 5, 6, 7, 9]]
    assert [s["completion_token_ids"] for s in steps] == [[5, 6], [8]]
    assert [s["logprobs"] for s in steps] == [[-0.5, -0.0], [-1.0]] and all(s["prefix_ok"] for s in steps)
    assert {s["capture_level"] for s in steps} == {"tokens"}
    assert missing.EXACT_LOGPROBS in one["origin"]["missing"] and missing.TOKENS not in one["origin"]["missing"]


def test_an_evaluation_has_no_tokens_and_says_so(tmp_path: Path) -> None:
    nodes = [node("user", "q", token_ids=[], mask=[]), node("assistant", "a", 0, token_ids=[], mask=[])]
    (one,) = payloads(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    step = one["steps"][0]
    assert step["capture_level"] == "text" and step["completion_token_ids"] is None and step["logprobs"] is None
    assert {missing.TOKENS, missing.LOGPROBS} <= set(one["origin"]["missing"])


def test_a_shared_action_is_a_step_of_one_branch_only(tmp_path: Path) -> None:
    nodes = [
        *(node("user", "q", **tokens([1], [False])), node("assistant", "a", 0, **tokens([2], [True], [-1.0]))),
        *(node("user", "x", 1), node("assistant", "left", 2), node("user", "y", 1), node("assistant", "right", 4)),
    ]
    found, drops, _ = read(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    assert [[turn.action for turn in one.turns] for one in found] == [["a", "right"], ["left"]]
    assert [one["content"] for one in found[1].opening] == ["q", "a", "x"] and not drops
    assert [one.own_id for one in found] == ["t1", "t1/3"]


def test_a_branch_without_an_action_of_its_own_is_dropped_by_name(tmp_path: Path) -> None:
    nodes = [node("user", "q"), node("assistant", "a", 0), node("user", "dangling", 1)]
    nodes += [node("user", "y", 1), node("assistant", "b", 3)]
    found, drops, _ = read(jsonl(tmp_path / "traces.jsonl", trace(nodes)))
    assert len(found) == 1 and [drop.reason for drop in drops] == ["branch_without_actions"]


def test_unscored_is_null_and_failed_is_an_error(tmp_path: Path) -> None:
    failed = episode(id="e2", ok=False, errors=[{"type": "Timeout", "message": "too slow"}])
    unscored = trace(TALK, "t2", rewards={"right": None})
    errs = trace(TALK, "t3", ok=False, errors=[{"type": "ToolError", "message": "broken"}])
    never = trace(TALK, "t4", rewards={})
    found = [row["rollout"] for row in payloads(jsonl(tmp_path / "traces.jsonl", failed, unscored, errs, never))]
    assert [(r["reward"], r["error_type"], r["num_steps"]) for r in found] == [
        (None, "Timeout", 0), (None, None, 2), (None, "ToolError", 2), (None, None, 2),
    ]  # fmt: skip
    facts = [row["origin"]["missing"] for row in payloads(tmp_path / "traces.jsonl")]
    assert [missing.REWARD in told for told in facts] == [False, False, False, True]


def test_a_graph_that_is_none_is_a_malformed_record(tmp_path: Path) -> None:
    looping = trace([node("user", "q", 1), node("assistant", "a", 0), node("user", "end", 1)])
    found, drops, _ = read(jsonl(tmp_path / "traces.jsonl", looping, trace(TALK)))
    assert len(found) == 1 and drops[0].reason == "malformed_record" and drops[0].line == 1


def test_the_folder_says_whether_an_episode_entered_a_batch(tmp_path: Path) -> None:
    for subset in ("all", "effective"):
        jsonl(tmp_path / "step_1" / "train" / subset / "traces.jsonl", episode(trace(TALK)))
    found, _, _ = read(tmp_path)
    assert [one.effective for one in found] == [False, True]
