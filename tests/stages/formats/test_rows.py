"""Rows of trajectories: null where nothing is known, tokens as deltas, secrets without ids."""

from itertools import accumulate
from pathlib import Path
from typing import Any

from support.foreign import jsonl, payloads

from stages.formats.base import ImportedTurn, family_of
from stages.formats.rows import capture_level
from stages.rollouts import missing
from stages.rollouts.agent_loop import state_sha256
from stages.rollouts.trace import digests_of_prefixes
from stages.runs.kinds import ORIGIN, ROLLOUT, STEP, TASK

TOKENS = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}


def row(answer: str = "a", **more: Any) -> dict[str, Any]:
    completion = [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "b"},
    ]
    return {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": completion,
        "answer": "a",
        "reward": 0.5,
        **more,
    }


def test_rows_fit_the_kinds_and_the_reward_stands_on_the_last_step(tmp_path: Path) -> None:
    (one,) = payloads(jsonl(tmp_path / "results.jsonl", row()))
    for kind, rows in (
        (TASK, [one["task"]]),
        (ROLLOUT, [one["rollout"]]),
        (STEP, one["steps"]),
        (ORIGIN, [one["origin"]]),
    ):
        for found in rows:
            kind.check(found)
    assert [(s["reward"], s["done"]) for s in one["steps"]] == [(0.0, False), (0.5, True)]
    unknown = (
        "seed",
        "sandbox",
        "visible_pass",
        "hacked",
        "protocol_ok",
        "cost_usd",
        "prompt_tokens",
        "completion_tokens",
    )
    assert all(one["rollout"][name] is None for name in unknown)
    assert all(
        one["steps"][0][name] is None for name in ("returncode", "timed_out", "raw_chars", "latency_s", "logprob_kind")
    )


def test_ids_that_do_not_go_on_are_kept_whole(tmp_path: Path) -> None:
    calls = [{"tokens": TOKENS}, {"tokens": {**TOKENS, "prompt_ids": [1, 9]}}]
    (one,) = payloads(jsonl(tmp_path / "results.jsonl", row(trajectory=calls)))
    assert [s["prefix_ok"] for s in one["steps"]] == [True, False]
    assert one["steps"][1]["prompt_delta_token_ids"] == [1, 9]


def test_a_redacted_rollout_keeps_no_ids_that_spell_the_secret(tmp_path: Path) -> None:
    calls = [{"tokens": TOKENS}, {"tokens": TOKENS}]
    clean, secret = payloads(
        jsonl(tmp_path / "results.jsonl", row(trajectory=calls), row("ghp_" + "a1B2" * 9, trajectory=calls))
    )
    assert clean["steps"][0]["completion_token_ids"] == [3] and secret["steps"][0]["completion_token_ids"] is None
    assert secret["steps"][0]["action"] == "[redacted: github-token]" and secret["steps"][0]["capture_level"] == "text"
    assert missing.TOKENS in secret["origin"]["missing"]


def test_ids_are_the_sources_own_or_the_place_in_the_file(tmp_path: Path) -> None:
    first = [p["rollout"]["rollout_id"] for p in payloads(jsonl(tmp_path / "a" / "results.jsonl", row(), row()))]
    again = [p["rollout"]["rollout_id"] for p in payloads(jsonl(tmp_path / "b" / "results.jsonl", row(), row()))]
    assert first == again and len(set(first)) == 2


def test_capture_levels() -> None:
    assert capture_level(ImportedTurn("a", prompt_ids=[], completion_ids=[1], logprobs=[-1.0])) == "tokens"
    assert capture_level(ImportedTurn("a", logprobs=[-1.0])) == "logprobs"
    assert (
        capture_level(ImportedTurn("a", prompt_ids=[1], completion_ids=[1]))
        == capture_level(ImportedTurn("a"))
        == "text"
    )


def test_families() -> None:
    assert family_of("scikit-learn__scikit-learn-14141") == "scikit-learn/scikit-learn"
    assert family_of("wiki/abc-1") == "wiki/abc-1" and family_of("a__b-c") == "a__b-c"


def test_digests_of_states_are_those_of_whole_conversations() -> None:
    gains = [[], [{"role": "user", "content": "ä"}], [], [{"role": "assistant", "content": ""}] * 2]
    states = list(accumulate(gains, lambda state, gain: [*state, *gain]))
    assert digests_of_prefixes(gains) == [state_sha256(state) for state in states]
