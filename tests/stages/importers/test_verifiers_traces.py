"""verifiers 0.4 and PRIME-RL traces: episodes, bare traces, branches, token deltas, duplicates."""

from pathlib import Path
from typing import Any

import pytest
from support.foreign import document, jsonl, payloads, read

from stages.rollouts import missing
from stages.rollouts.trace import prompt_ids


def node(role: str, content: str, parent: int | None = None, **more: Any) -> dict[str, Any]:
    found = {"message": {"role": role, "content": content}, "sampled": role == "assistant", **more}
    return found if parent is None else {"parent": parent, **found}


def trace(nodes: list[dict[str, Any]], trace_id: str = "t1", **more: Any) -> dict[str, Any]:
    task = {"type": "Sum", "data": {"idx": 3, "prompt": "1+1?", "answer": "2"}, "key": "sum/3", "hash": "h"}
    told = {
        "rewards": {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.2}},
        "ok": True,
        "is_completed": True,
    }
    return {"version": 1, "id": trace_id, "task": task, "agent": {"config": {}}, "nodes": nodes, **told, **more}


def episode(*traces: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = {"type": "Sum", "data": {"idx": 3, "prompt": "1+1?"}, "key": "sum/3"}
    return {
        "id": "e1",
        "env": {"id": "sums", "name": "sums-train"},
        "task": task,
        "ok": True,
        "traces": list(traces),
        **more,
    }


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
    assert whole.turns == bare.turns and whole.opening == bare.opening == [{"role": "user", "content": "1+1?"}]
    assert [turn.action for turn in whole.turns] == ["3", "2"] and whole.turns[0].observed[0]["content"] == "no"
    assert (
        whole.task_id == "sums-train/sum/3"
        and whole.own_id == "t1"
        and whole.model == "m"
        and whole.statement == "1+1?"
    )
    assert whole.reward == pytest.approx(0.7)
    assert (whole.turns[0].finish_reason, whole.turns[0].prompt_tokens, whole.turns[1].prompt_tokens) == (
        "stop",
        3,
        None,
    )


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
    nodes = [
        node("user", "q"),
        node("assistant", "a", 0),
        node("user", "dangling", 1),
        node("user", "y", 1),
        node("assistant", "b", 3),
    ]
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


def test_a_document_of_one_episode_is_read_too(tmp_path: Path) -> None:
    found, _, _ = read(document(tmp_path / "trace.json", episode(trace(TALK))))
    assert len(found) == 1
