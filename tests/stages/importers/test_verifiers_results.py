"""Older verifiers results: identity of tasks, tool calls in JSON text, failed runs, token columns."""

import json
from pathlib import Path
from typing import Any

from support.foreign import REAL, call, document, jsonl, needs_real, payloads, read

from stages.messages import ToolCall
from stages.messages import read as parts_of
from stages.rollouts import missing

SEARCH = '{"query":  "Utsuro-bune", "top": 3}'


def row(**more: Any) -> dict[str, Any]:
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [json.dumps(call("search", SEARCH))]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "Hollow ship", "tool_calls": None},
    ]
    prompt = [{"role": "system", "content": "Help."}, {"role": "user", "content": "What?"}]
    return {
        "id": 0,
        "prompt": prompt,
        "completion": completion,
        "answer": "Hollow ship",
        "reward": 1.0,
        "task": "default",
        **more,
    }


def test_calls_keep_their_arguments_to_the_letter(tmp_path: Path) -> None:
    document(tmp_path / "metadata.json", {"env_id": "wiki", "model": "m", "sampling_args": {"max_tokens": 5}})
    (one,), drops, _ = read(jsonl(tmp_path / "results.jsonl", row(total_ms=1500.0)))
    assert parts_of(one.turns[0].action).calls == (ToolCall("search", SEARCH),)
    assert one.turns[0].observed == [{"role": "tool", "content": "found"}] and one.turns[1].action == "Hollow ship"
    assert (one.env, one.model, one.wall_s, one.sampling) == ("wiki", "m", 1.5, {"max_tokens": 5}) and not drops


def test_a_task_is_its_question_and_answer_whatever_the_id_and_the_system_prompt(tmp_path: Path) -> None:
    bare = row(id=7, prompt=[{"role": "user", "content": "What?"}])
    other = row(answer="Something else")
    found, _, _ = read(jsonl(tmp_path / "results.jsonl", row(), bare, other))
    assert found[0].task_id == found[1].task_id != found[2].task_id


def test_a_completion_that_never_came_has_no_reward(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "results.jsonl", row(completion=[], reward=0.0)))
    assert (
        one["rollout"]["reward"] is None and one["rollout"]["error_type"] == "empty_completion" and one["steps"] == []
    )


def test_a_base_model_has_text_on_both_sides(tmp_path: Path) -> None:
    (one,), _, _ = read(jsonl(tmp_path / "results.jsonl", row(prompt="It was", completion=" dark.")))
    assert one.opening[0]["content"] == "It was" and [turn.action for turn in one.turns] == [" dark."]


def test_newer_columns_give_tokens_ends_and_errors(tmp_path: Path) -> None:
    said = [
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}],
        }
    ]
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


@needs_real
def test_real_wiki_search() -> None:
    found, drops, _ = read(REAL / "wiki-search")
    assert len(found) == 480 and not drops and len({one.task_id for one in found}) == 60
    assert (
        len({one.model for one in found}) == 9
        and len({one.opening[0]["content"] for one in found if len(one.opening) == 2}) == 1
    )


@needs_real
def test_real_runs_of_other_environments() -> None:
    found, drops, _ = read(REAL / "verifiers")
    assert len(found) == 231 and not drops
    failed = [one for one in found if one.error]
    assert len(failed) == 150 and {one.env for one in failed} == {"gsm8k"}
    tasks = {
        env: {one.task_id for one in found if one.env == env}
        for env in ("math-python", "wordle", "continuation-quality")
    }
    assert {env: len(ids) for env, ids in tasks.items()} == {"math-python": 5, "wordle": 5, "continuation-quality": 5}
