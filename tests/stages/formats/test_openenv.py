"""OpenEnv episodes and training traces: masks, compaction, envelopes."""

from pathlib import Path
from typing import Any

from support.transcripts import call, document, jsonl, payloads, read

from stages.rollouts import missing
from stages.rollouts.trace import prompt_ids

SYSTEM, ASK = {"role": "system", "content": "Help."}, {"role": "user", "content": "1+1?"}


def episode(**more: Any) -> dict[str, Any]:
    messages = [SYSTEM, ASK, {"role": "assistant", "content": "", "tool_calls": [call("sum", '{"a":  1}')]}]
    messages += [
        {"role": "tool", "tool_call_id": "call_1", "name": "sum", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    told = {
        "reward": 1.0,
        "done": True,
        "tool_trace": [],
        "metrics": {"turns": 2},
        "verify_metrics": {},
        "artifacts": {},
    }
    return {"episode_id": "ep-000000", "messages": messages, "task": {"task_id": "sum-1"}, "extra": {}, **told, **more}


def turn(
    node: str, sent: list[dict[str, Any]], reply: str, prompt: list[int], sampled: list[int], mask: int = 1
) -> dict[str, Any]:
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-0.5] * len(sampled),
        "loss_mask": [0] * len(prompt) + [mask] * len(sampled),
        "request": {"messages": sent, "tools": None},
        "response": {"choices": [{"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}]},
        "metadata": {"model": "m", "sampling_params": {"temperature": 1.0}},
    }


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SECOND = [SYSTEM, ASK, said("3"), {"role": "user", "content": "no"}]
TRACE = {
    "schema_version": 1,
    "turns": [turn("a", [SYSTEM, ASK], "3", [1], [2, 3]), turn("b", SECOND, "2", [1, 2, 3, 4], [5])],
}


def test_an_episode(tmp_path: Path) -> None:
    document(tmp_path / "metadata.json", {"env_id": "sums", "model": "m"})
    (one,), drops, _ = read(jsonl(tmp_path / "results.jsonl", episode()))
    assert (one.task_id, one.model, one.reward, len(one.turns)) == ("sums/sum-1", "m", 1.0, 2) and not drops
    assert one.turns[0].action == '<tool_call>\n{"name": "sum", "arguments": {"a":  1}}\n</tool_call>'
    (row,) = payloads(tmp_path / "results.jsonl")
    assert {missing.TOKENS, missing.FINISH} <= set(row["origin"]["missing"])


def test_a_training_trace_has_tokens_but_no_reward(tmp_path: Path) -> None:
    (one,) = payloads(document(tmp_path / "trace.json", TRACE))
    assert prompt_ids(one["steps"]) == [[1], [1, 2, 3, 4]] and [s["completion_token_ids"] for s in one["steps"]] == [
        [2, 3],
        [5],
    ]
    assert [s["action"] for s in one["steps"]] == ["3", "2"] and one["steps"][0]["observation"] == "no"
    assert (
        one["rollout"]["reward"] is None
        and missing.REWARD in one["origin"]["missing"]
        and one["rollout"]["model"] == "m"
    )


def test_an_envelope_gives_a_trace_its_episode(tmp_path: Path) -> None:
    (one,) = payloads(
        jsonl(
            tmp_path / "t.jsonl", {"episode_id": "e", "rollout_id": "r", "task_id": "t", "reward": 0.5, "trace": TRACE}
        )
    )
    assert (one["rollout"]["rollout_id"], one["rollout"]["task_id"], one["rollout"]["reward"]) == ("r", "t", 0.5)


def test_entries_alone_are_a_trace(tmp_path: Path) -> None:
    found, _, _ = read(document(tmp_path / "entries.json", TRACE["turns"]))
    assert len(found) == 1 and len(found[0].turns) == 2


def test_a_masked_call_is_context_and_no_step(tmp_path: Path) -> None:
    masked = {**TRACE, "turns": [turn("a", [SYSTEM, ASK], "3", [1], [2, 3], mask=0), TRACE["turns"][1]]}
    (one,) = payloads(document(tmp_path / "trace.json", masked))
    assert [s["action"] for s in one["steps"]] == ["2"] and one["steps"][0]["num_messages"] == 4


def test_a_conversation_that_starts_over_is_another_rollout(tmp_path: Path) -> None:
    compacted = {
        **TRACE,
        "turns": [*TRACE["turns"], turn("c", [SYSTEM, {"role": "user", "content": "summary"}], "4", [9], [8])],
    }
    found, _, _ = read(document(tmp_path / "trace.json", compacted))
    assert [len(one.turns) for one in found] == [2, 1]
