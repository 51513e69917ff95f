"""OpenEnv episodes and training traces: masks, compaction, envelopes."""

from pathlib import Path
from typing import Any

from support.transcripts import action, assistant, call, document, jsonl, payloads, read, system, tool, user

from composer_stages.rollouts import missing
from composer_stages.rollouts.trace import prompt_ids

SYSTEM, ASK = system("Help."), user("1+1?")


def turn(
    node: str, sent: list[dict[str, Any]], reply: str, prompt: list[int], sampled: list[int], mask: int = 1
) -> dict[str, Any]:
    tokens = {"prompt_token_ids": prompt, "completion_token_ids": sampled, "per_token_logps": [-0.5] * len(sampled)}
    return {
        "node_id": node,
        **tokens,
        "loss_mask": [0] * len(prompt) + [mask] * len(sampled),
        "request": {"messages": sent, "tools": None},
        "response": {"choices": [{"message": assistant(reply), "finish_reason": "stop"}]},
        "metadata": {"model": "m", "sampling_params": {"temperature": 1.0}},
    }


TURNS = [turn("a", [SYSTEM, ASK], "3", [1], [2, 3])]
TURNS.append(turn("b", [SYSTEM, ASK, assistant("3"), user("no")], "2", [1, 2, 3, 4], [5]))
TRACE = {"schema_version": 1, "turns": TURNS}


def test_an_episode(tmp_path: Path) -> None:
    document(tmp_path / "metadata.json", {"env_id": "sums", "model": "m"})
    messages = [SYSTEM, ASK, assistant("", tool_calls=[call("sum", '{"a":  1}')])]
    messages += [tool("2", tool_call_id="call_1", name="sum"), assistant("2")]
    fields = {"reward": 1.0, "done": True, "tool_trace": [], "metrics": {"turns": 2}, "verify_metrics": {}}
    episode = {"episode_id": "ep-000000", "messages": messages, "task": {"task_id": "sum-1"}, "extra": {}, **fields}
    (rollout,), drops, _ = read(jsonl(tmp_path / "results.jsonl", {**episode, "artifacts": {}}))
    assert (rollout.task_id, rollout.model, rollout.reward) == ("sums/sum-1", "m", 1.0)
    assert len(rollout.turns) == 2 and not drops
    assert rollout.turns[0].action == action("", ("sum", '{"a":  1}'))
    (row,) = payloads(tmp_path / "results.jsonl")
    assert {missing.TOKENS, missing.FINISH} <= set(row["origin"]["missing"])


def test_a_training_trace_has_tokens_but_no_reward(tmp_path: Path) -> None:
    (payload,) = payloads(document(tmp_path / "trace.json", TRACE))
    assert prompt_ids(payload["steps"]) == [[1], [1, 2, 3, 4]]
    assert [(s["action"], s["completion_token_ids"]) for s in payload["steps"]] == [("3", [2, 3]), ("2", [5])]
    assert payload["steps"][0]["observation"] == "no" and missing.REWARD in payload["origin"]["missing"]
    assert (payload["rollout"]["reward"], payload["rollout"]["model"]) == (None, "m")


def test_an_envelope_gives_a_trace_its_episode(tmp_path: Path) -> None:
    envelope = {"episode_id": "e", "rollout_id": "r", "task_id": "t", "reward": 0.5, "trace": TRACE}
    (payload,) = payloads(jsonl(tmp_path / "t.jsonl", envelope))
    assert payload["rollout"] | {"rollout_id": "r", "task_id": "t", "reward": 0.5} == payload["rollout"]


def test_entries_alone_are_a_trace(tmp_path: Path) -> None:
    (rollout,), _, _ = read(document(tmp_path / "entries.json", TURNS))
    assert len(rollout.turns) == 2


def test_a_masked_call_is_context_and_no_step(tmp_path: Path) -> None:
    masked = {**TRACE, "turns": [turn("a", [SYSTEM, ASK], "3", [1], [2, 3], mask=0), TURNS[1]]}
    (payload,) = payloads(document(tmp_path / "trace.json", masked))
    assert [s["action"] for s in payload["steps"]] == ["2"] and payload["steps"][0]["num_messages"] == 4


def test_a_conversation_that_starts_over_is_another_rollout(tmp_path: Path) -> None:
    compacted = {**TRACE, "turns": [*TURNS, turn("c", [SYSTEM, user("summary")], "4", [9], [8])]}
    rollouts, _, _ = read(document(tmp_path / "trace.json", compacted))
    assert [len(rollout.turns) for rollout in rollouts] == [2, 1]
