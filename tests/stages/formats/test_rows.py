"""Rows of trajectories: null where nothing is known, tokens as deltas, secrets without ids."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import assistant, jsonl, payloads, user

from composer_stages.formats.base import INSTANCE, ImportedTurn, Trajectory, family_of
from composer_stages.formats.reading import check
from composer_stages.formats.rows import capture_level
from composer_stages.rollouts import missing
from composer_stages.rollouts.trace import digests_of_prefixes, state_sha256
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK

TOKENS = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}


def row(answer: str = "a", **more: Any) -> dict[str, Any]:
    completion = [assistant(answer), user("no"), assistant("b")]
    return {"prompt": [user("q")], "completion": completion, "answer": "a", "reward": 0.5, **more}


def test_rows_fit_their_kinds_and_the_last_step_has_the_reward(tmp_path: Path) -> None:
    (payload,) = payloads(jsonl(tmp_path / "results.jsonl", row()))
    of_one = ((TASK, payload["task"]), (ROLLOUT, payload["rollout"]), (ORIGIN, payload["origin"]))
    for kind, each in (*of_one, *((STEP, step) for step in payload["steps"])):
        kind.check(each)
    assert [(s["reward"], s["done"]) for s in payload["steps"]] == [(0.0, False), (0.5, True)]
    unknown = {"seed", "sandbox", "visible_pass", "hacked", "protocol_ok", "cost_usd", "prompt_tokens"}
    assert {payload["rollout"][name] for name in unknown} == {None}
    unmeasured = {"returncode", "timed_out", "raw_chars", "latency_s", "logprob_kind"}
    assert {payload["steps"][0][name] for name in unmeasured} == {None}


def test_prompts_that_do_not_extend_the_last_are_stored_in_full(tmp_path: Path) -> None:
    calls = [{"tokens": TOKENS}, {"tokens": {**TOKENS, "prompt_ids": [1, 9]}}]
    (payload,) = payloads(jsonl(tmp_path / "results.jsonl", row(trajectory=calls)))
    assert [s["prefix_ok"] for s in payload["steps"]] == [True, False]
    assert payload["steps"][1]["prompt_delta_token_ids"] == [1, 9]


def test_a_redacted_rollout_keeps_no_ids_that_spell_the_secret(tmp_path: Path) -> None:
    calls = [{"tokens": TOKENS}, {"tokens": TOKENS}]
    rows = row(trajectory=calls), row("ghp_" + "a1B2" * 9, trajectory=calls)
    clean, secret = payloads(jsonl(tmp_path / "results.jsonl", *rows))
    assert clean["steps"][0]["completion_token_ids"] == [3] and secret["steps"][0]["completion_token_ids"] is None
    assert secret["steps"][0]["action"] == "[redacted: github-token]" and secret["steps"][0]["capture_level"] == "text"
    assert missing.TOKENS in secret["origin"]["missing"]


def test_rollout_ids_depend_on_content_and_line(tmp_path: Path) -> None:
    first = [p["rollout"]["rollout_id"] for p in payloads(jsonl(tmp_path / "a" / "results.jsonl", row(), row()))]
    again = [p["rollout"]["rollout_id"] for p in payloads(jsonl(tmp_path / "b" / "results.jsonl", row(), row()))]
    assert first == again and len(set(first)) == 2


def test_capture_levels() -> None:
    ids, logprobs = {"prompt_ids": [1], "completion_ids": [1]}, {"logprobs": [-1.0]}
    levels = [capture_level(ImportedTurn("a", **recorded)) for recorded in (ids | logprobs, logprobs, ids, {})]
    assert levels == ["tokens", "logprobs", "text", "text"]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("scikit-learn__scikit-learn-10297", "scikit-learn/scikit-learn"),
        ("getmoto__moto.694ce1f4.pr_7331", "getmoto/moto"),
        ("Project-MONAI__MONAI.a09c1f08.lm_rewrite__1a2b3c4d", "Project-MONAI/MONAI"),
        ("pandas-dev__pandas.95280573", "pandas-dev/pandas"),
    ],
)
def test_ids_of_swe_bench_and_swe_smith_name_their_repository(name: str, family: str) -> None:
    assert INSTANCE.fullmatch(name) and family_of(name) == family
    match = INSTANCE.match(f"{name}.gemini-3-pro.traj")
    assert match is not None and match.group().startswith(name)


@pytest.mark.parametrize("name", ["a_file__of_mine", "x__y", "wiki/abc-1", "a__b-c"])
def test_other_names_are_families_of_their_own(name: str) -> None:
    assert family_of(name) == name and not INSTANCE.fullmatch(name)


@pytest.mark.parametrize("tools", [[], [{"name": "search", "parameters": {}}]])
def test_digests_of_states_are_those_of_whole_conversations(tools: list[Any]) -> None:
    gains = [[], [user("ä")], [], [assistant("")] * 2]
    states = list(accumulate(gains, lambda state, gain: [*state, *gain]))
    assert digests_of_prefixes(gains, tools) == [state_sha256(state, tools) for state in states]


# Fields of trajectories are checked strictly, except for what is kept as JSON text.


def trajectory(**fields: Any) -> Trajectory:
    given = {"task_id": "t", "env": "e", "opening": [user("q")], "turns": [ImportedTurn("a")], "missing": set()}
    return Trajectory(**{**given, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reward": 1, "cost_usd": 0.5, "seed": 3, "resolved": True, "error": ("kind", "words")},
        {"sampling": "text", "task_data": [1], "tools": "text", "extra": None},
        {"turns": [ImportedTurn("a", commands=[], prompt_ids=[1], completion_ids=[2], logprobs=[-1, -0.5])]},
    ],
)
def test_check_returns_a_valid_trajectory_unconverted(fields: dict[str, Any]) -> None:
    unchecked = trajectory(**fields)
    assert check(unchecked) is unchecked and (unchecked.reward is None or type(unchecked.reward) is int)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "high"}, "reward is 'high'"),
        ({"reward": True}, "reward is True"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"resolved": 1}, "resolved is 1"),
        ({"model": 3}, "model is 3"),
        ({"task_id": None}, "task_id is None"),
        ({"opening": [{"role": 1, "content": "q"}]}, "opening.0.role is 1"),
        ({"turns": [ImportedTurn("a", logprobs=[-1.0, "x"])]}, "turns.0.logprobs.1 is 'x'"),  # type: ignore[list-item]
        ({"turns": [ImportedTurn("a", prompt_ids=(1,))]}, "turns.0.prompt_ids is (1,)"),  # type: ignore[arg-type]
    ],
)
def test_check_names_the_first_field_of_a_wrong_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as refused:
        check(trajectory(**fields))
    assert str(refused.value) == message
