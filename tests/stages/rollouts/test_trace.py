"""States are stored as what they gained and read back as shown; rollouts are read one after the other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import row, written
from support.transcripts import assistant, system, tool, user

from composer_stages.envs.base import Grade, Observation, Task, Work
from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig, Sample
from composer_stages.policy.scripted import ScriptedPolicy
from composer_stages.rollouts.agent_loop import LiveRollout, Step
from composer_stages.rollouts.history import SUMMARY_REQUEST
from composer_stages.rollouts.recording import action_facts, payload, restore_rollout
from composer_stages.rollouts.trace import (
    item_steps,
    pairs_with_states,
    prompt_ids,
    read_states,
    rollout_rows,
    state_id,
    state_rows,
    state_sha256,
    states,
)
from composer_stages.runs import store
from composer_stages.runs.kinds import PAIR, ROLLOUT, STATE, STEP
from composer_stages.runs.run import Run


def steps(count: int, history: str | None = None, ids: bool = True, broken_at: int = -1) -> list[dict[str, Any]]:
    """One rollout; at `broken_at` a prompt does not go on from the one before."""
    rows = []
    for i in range(count):
        new = [assistant(f"a{i}"), user(f"long output {i} " * 9)] if i else [user("q")]
        about: dict[str, Any] = {"rollout_id": "r", "step": i, "history": history}
        about |= {"new_messages_json": store.encode(new).decode(), "prefix_ok": i != broken_at}
        about |= {"prompt_delta_token_ids": [i, 7], "completion_token_ids": [i + 100]} if ids else {}
        rows.append(row(STEP, about))
    for one, messages in zip(rows, states(rows), strict=True):
        one["state_sha256"] = state_sha256(messages)
    return rows


@pytest.mark.parametrize(
    "made", [{}, {"history": "last 2"}, {"ids": False}, {"broken_at": 3}, {"history": "last 1", "broken_at": 2}]
)
@pytest.mark.parametrize("last", [0, 4, 5])
def test_states_are_read_back_as_they_were_shown(made: dict[str, Any], last: int) -> None:
    rollout = steps(6, **made)
    shown = zip(map(state_id, rollout), states(rollout), prompt_ids(rollout), strict=True)
    assert list(read_states(list(state_rows(rollout, last)))) == list(shown)[: last + 1]


def test_state_rows_of_a_long_rollout_are_linear_in_size() -> None:
    rollout = steps(200)
    stored = sum(len(one["new_messages_json"]) + 4 * len(one["new_token_ids"]) for one in state_rows(rollout, 199))
    assert stored < 1.05 * sum(len(one["new_messages_json"]) + 12 for one in rollout)


def test_pairs_are_joined_with_their_states(tmp_path: Path) -> None:
    rollout = steps(3)
    pairs = [{"pair_id": str(i), "state_id": f"r/{i % 3}", "state_sha256": "x"} for i in (2, 0, 2)]
    run = Run(written(tmp_path, "extract-pairs/run", [(PAIR, pairs), (STATE, list(state_rows(rollout, 2)))]))
    found = list(pairs_with_states(run))
    assert [one["pair_id"] for one in found] == ["2", "0", "2"]
    assert [one["messages_json"] for one in found] == [store.encode(states(rollout)[i]).decode() for i in (2, 0, 2)]
    assert [one["prompt_token_ids"] for one in found] == [prompt_ids(rollout)[i] for i in (2, 0, 2)]


def run(folder: Path, rollouts: list[str], steps: list[tuple[str, int]]) -> Run:
    rows = [{"rollout_id": name} for name in rollouts], [{"rollout_id": name, "step": step} for name, step in steps]
    return Run(written(folder, "collect/run", list(zip((ROLLOUT, STEP), rows, strict=True))))


def test_rollouts_are_joined_with_their_steps(tmp_path: Path) -> None:
    found = rollout_rows(run(tmp_path, ["b", "none", "a", "last"], [("b", 1), ("b", 0), ("a", 0)]))
    told = [(rollout["rollout_id"], [step["step"] for step in steps]) for rollout, steps in found]
    assert told == [("b", [0, 1]), ("none", []), ("a", [0]), ("last", [])]


@pytest.mark.parametrize("steps", [[("a", 0), ("b", 0)], [("b", 0), ("a", 0), ("b", 1)], [("stranger", 0)]])
def test_steps_in_another_order_than_the_rollouts_are_refused(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    with pytest.raises(BadInput, match="do not lie in the order of the rollouts"):
        list(rollout_rows(run(tmp_path, ["b", "a"], steps)))


def played() -> LiveRollout:
    """A request for a summary, two results of one answer, and an answer that was cut off."""
    task = Task("t", "env", "train", "f", {})
    rollout = LiveRollout(task, 0, 0, [system("s"), user("q")])
    turns: list[tuple[str, list[str], Observation]] = [
        ("look", ["head [9 characters left out] tail"], Observation("", returncode=1, raw_chars=18, elided_chars=9)),
        ("summary", ["go on"], Observation("go on")),
        ("two calls", ["one", "two"], Observation("one\ntwo", returncode=0, parse_error="no call")),
        ("cut o", [], Observation("")),
    ]
    for text, results, observation in turns:
        if text == "summary":
            rollout.messages.append(SUMMARY_REQUEST)
        recorded = rollout.steps[-1].num_messages if rollout.steps else 0
        sample = Sample(text, completion_tokens=len(text), finish_reason="length" if text == "cut o" else "stop")
        new = rollout.messages[recorded:]
        rollout.steps.append(Step(new, len(rollout.messages), "", sample, observation, 0))
        rollout.messages += [assistant(text), *map(tool, results)]
    return rollout


def test_evaluation_items_give_back_their_steps() -> None:
    rollout = played()
    item: dict[str, Any] = {**action_facts(rollout), "num_steps": len(rollout.steps)}
    found = item_steps(item)
    assert [one["action"] for one in found] == ["look", "summary", "two calls", "cut o"]
    assert [one["observation"] for one in found] == ["head [9 characters left out] tail", "go on", "one\ntwo", ""]
    assert [json.loads(one["new_messages_json"]) for one in found] == [step.new_messages for step in rollout.steps]
    facts = ("returncode", "raw_chars", "elided_chars", "truncated", "parse_error", "completion_tokens")
    assert [tuple(one[name] for name in facts) for one in found] == [
        (1, 18, 9, None, None, 4),
        (None, None, None, None, None, 7),
        (0, None, None, None, "no call", 9),
        (None, None, None, True, None, 5),
    ]
    assert item_steps({"transcript_json": None, "num_steps": 0}) == []


def test_a_recorded_rollout_is_restored() -> None:
    rollout, policy = played(), ScriptedPolicy(PolicyConfig(model="noop"))
    ids = [1, 2]
    for version, step in enumerate(rollout.steps):
        given = {"prompt_ids": ids, "completion_ids": [7, 8], "logprobs": [-0.1, -1 / 3], "policy_version": version}
        step.sample = replace(step.sample, **given, latency_s=0.25, prompt_tokens=len(ids))
        ids = [*ids, 7, 8, 9]
    work = Work(patch="diff", f2p_passed=1, canary=("a",), metrics={"seconds": 0.5})
    rollout.grade = Grade(0.25, hidden_pass=False, protocol_ok=True, ground="values", work=work)
    rollout.terminated_by, rollout.wall_s, rollout.tools = "max_tokens", 1.5, ({"name": "bash"},)
    recorded = payload(rollout, policy, sandbox="none", source="train")
    found = restore_rollout(LiveRollout(rollout.task, 0, 0), json.loads(store.encode(recorded)))
    assert payload(found, policy, sandbox="none", source="train") == recorded
    last = rollout.steps[-1].num_messages
    assert found.messages[:last] == rollout.messages[:last] and found.grade == rollout.grade
    one, other = ([(s.sample, s.observation.content) for s in each.steps] for each in (found, rollout))
    assert one == other
