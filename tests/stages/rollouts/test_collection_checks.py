"""The collection checks of imported rows: what a source cannot tell is neither passed nor failed."""

from dataclasses import replace
from typing import Any

import pytest
from support.runs import row
from support.transcripts import assistant, tool, user

from composer_stages.rollouts import collection_checks, missing
from composer_stages.rollouts.missing import Fact
from composer_stages.rollouts.trace import state_sha256
from composer_stages.runs import store
from composer_stages.runs.kinds import STEP


def rollout(rollout_id: str = "r", **changes: Any) -> list[dict[str, Any]]:
    """Two sound text-only steps, the second observed through two messages."""
    opening, gained = [user("q")], [assistant("a"), tool("x"), tool("y")]

    def step(number: int, new: list[Any], state: list[Any], action: str, **told: Any) -> dict[str, Any]:
        seen = {"new_messages_json": store.encode(new).decode(), "state_sha256": state_sha256(state), "action": action}
        about = {"rollout_id": rollout_id, "step": number, "truncated": False, "capture_level": "text"}
        return row(STEP, {**about, **seen, **told})

    first = step(0, opening, opening, "a", observation="x\ny", reward=0.0, done=False)
    second = step(1, gained, [*opening, *gained], "b", observation="", reward=1.0, done=True)
    return [{**first, **changes}, second]


def verdicts(steps: list[dict[str, Any]], absent: dict[str, set[Fact]], reward: float | None = 1.0) -> dict[str, str]:
    rollouts = [{"rollout_id": name, "reward": reward} for name in dict.fromkeys(s["rollout_id"] for s in steps)]
    return {check.name: check.verdict for check in collection_checks.check(rollouts, steps, len(rollouts), absent)}


def test_several_observed_messages_are_one_observation() -> None:
    assert set(verdicts(rollout(), {}).values()) == {"ok", "not recorded"}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"observation": "x"}, "state hash chain"),
        ({"action": "z"}, "state hash chain"),
        ({"reward": None}, "tuples complete"),
    ],
)
def test_a_broken_hash_chain_is_found(change: dict[str, Any], check: str) -> None:
    assert verdicts(rollout(**change), {})[check] == "FAIL"


def test_states_of_older_runs_have_no_tools_in_their_digests() -> None:
    declared = {"rollout_id": "r", "reward": 1.0, "tools_json": '[{"name": "bash"}]'}
    found = {check.name: check.verdict for check in collection_checks.check([declared], rollout(), 1)}
    assert found["state hash chain"] == "ok"


@pytest.mark.parametrize(
    ("fact", "change", "checks"),
    [
        (missing.FINISH, {"truncated": True}, ["answers not truncated"]),
        (missing.ELISION, {"elided_chars": 5}, ["no output elided"]),
        (missing.PARSE, {"parse_error": "bad"}, ["actions well-formed"]),
        (missing.LOGPROBS, {"logprobs": [0.5]}, ["log-probs finite, <= 0"]),
        (missing.LOGPROBS, {"logprobs": [None]}, ["log-probs finite, <= 0"]),  # of NaN
        (missing.TOKENS, {"prefix_ok": False}, ["prompt extends the last"]),
    ],
)
def test_a_check_without_its_facts_is_not_recorded(fact: Fact, change: dict[str, Any], checks: list[str]) -> None:
    told, not_recorded = verdicts(rollout(**change), {}), verdicts(rollout(**change), {"r": {fact}})
    assert all(told[name] == "FAIL" and not_recorded[name] == "not recorded" for name in checks)


def test_unrecorded_rewards_differ_from_missing_rewards() -> None:
    assert verdicts(rollout(reward=None), {}, None)["rollouts scored"] == "FAIL"
    unrecorded = verdicts(rollout(reward=None), {"r": {missing.REWARD}}, None)
    assert unrecorded["rollouts scored"] == unrecorded["reward in [0, 1]"] == "not recorded"
    assert unrecorded["tuples complete"] == "ok"  # state and action are there


def test_a_mixed_import_counts_both() -> None:
    steps = [*rollout("told"), *rollout("not_recorded")]
    rollouts = [{"rollout_id": "told", "reward": 1.0}, {"rollout_id": "not_recorded", "reward": None}]
    checks = {c.name: c for c in collection_checks.check(rollouts, steps, 2, {"not_recorded": {missing.REWARD}})}
    scored = checks["rollouts scored"]
    assert (scored.total, scored.unrecorded, scored.verdict) == (1, 1, "ok")
    assert "1 of 1, 1 not recorded" in collection_checks.table(list(checks.values()))


def test_a_table_lists_only_checks_that_some_row_failed() -> None:
    passed, within = (collection_checks.CollectionCheck("a", num, 10, 0.2) for num in (0, 2))
    beyond, nothing = (collection_checks.CollectionCheck("b", *counts) for counts in ((1, 10, 0.0), (0, 0, 0.0, 10)))
    steps = collection_checks.CollectionCheck("state hash chain", 0, 0, unrecorded=10)
    assert collection_checks.table([passed, passed]) == "Collection checks: all 2 passed"
    nothing = replace(nothing, name="answers not filtered")
    head, *lines = collection_checks.table([passed, within, beyond, nothing, steps]).splitlines()
    assert head == "Collection checks: 2 of 3 passed; 2 more need what was not recorded (finish reasons, steps)"
    assert [line.split(maxsplit=2) for line in lines] == [["ok", "a", "8 of 10"], ["FAIL", "b", "9 of 10"]]


LOST_CALL = {"truncated": True, "finish_reason": "malformed_call", "parse_error": "no call"}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"capture_level": "logprobs", "logprobs": [-0.5]}, set()),  # of a server that was asked for them
        ({"capture_level": "text", "logprobs": [-0.5]}, {"ids as many as log-probs"}),
        (LOST_CALL, {"actions well-formed"}),
    ],
)
def test_what_a_server_tells_and_loses_is_checked(change: dict[str, Any], failed: set[str]) -> None:
    assert {name for name, verdict in verdicts(rollout(**change), {}).items() if verdict == "FAIL"} == failed


def test_a_check_over_nothing_fails() -> None:
    assert collection_checks.CollectionCheck("x", 0, 0).verdict == "FAIL"
    assert collection_checks.CollectionCheck("x", 0, 0, unrecorded=3).verdict == "not recorded"


def test_rollouts_without_steps_are_not_recorded_only_where_the_source_declares_it() -> None:
    rollouts = [{"rollout_id": "r", "reward": 1.0}]
    declared, told = (
        {check.name: check.verdict for check in collection_checks.check(rollouts, [], 1, absent)}
        for absent in ({"r": {missing.STEPS}}, {})
    )
    assert declared["state hash chain"] == "not recorded" and declared["rollouts scored"] == "ok"
    assert told["state hash chain"] == "FAIL"


@pytest.mark.parametrize(
    ("change", "check"),
    [({"truncated": True}, "answers not truncated"), ({"parse_error": "bad"}, "actions well-formed")],
)
def test_a_fifth_of_the_answers_may_be_truncated_or_malformed(change: dict[str, Any], check: str) -> None:
    def of(failed: int) -> str:
        steps = [row for i in range(5) for row in rollout(f"r{i}", **(change if i < failed else {}))]
        return verdicts(steps, {})[check]

    assert (of(2), of(3)) == ("ok", "FAIL"), "two and three of ten steps"
