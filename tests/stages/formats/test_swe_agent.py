"""SWE-agent trajectories: history, steps alone, demonstrations, attempts."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import INSTANCE, PATCH, assistant, call, document, read, system, user

ASKED = "We have an issue.\nISSUE:\nIt breaks.\n\nINSTRUCTIONS:\nFix it."


def history(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**system("SETTING"), "message_type": "system_prompt"},
        user("Here is a demonstration", is_demo=True),
        assistant("demo action", is_demo=True, action="demo"),
        user([{"type": "text", "text": ASKED}]),
        assistant("I look.\n```\nls -a\n```", thought="I look.", action="ls -a\n"),
        user("a.py", message_type="observation"),
        *more,
    ]


SPENT = {"instance_cost": 0.2, "tokens_sent": 10, "tokens_received": 0}
INFO = {"exit_status": "submitted", "submission": PATCH, "model_stats": SPENT}


def test_history_with_demonstrations_in_the_opening(tmp_path: Path) -> None:
    called = assistant("Now.", tool_calls=[call("bash", '{"command": "submit"}')], action="submit")
    record = {"environment": "main", "trajectory": [], "history": history(called), "info": INFO}
    (rollout,), drops, _ = read(document(tmp_path / f"{INSTANCE}.traj", record))
    assert [turn.commands for turn in rollout.turns] == [["ls -a"], ["submit"]]
    assert len(rollout.opening) == 4 and not drops
    assert rollout.statement == "It breaks." and rollout.submission == PATCH and rollout.task_id == INSTANCE
    assert rollout.turns[1].action.endswith('{"name": "bash", "arguments": {"command": "submit"}}\n</tool_call>')
    assert (rollout.prompt_tokens, rollout.completion_tokens, rollout.cost_usd) == (10, None, 0.2)


def test_steps_alone_are_enough(tmp_path: Path) -> None:
    step = {"action": "ls\n", "observation": "a.py", "response": "I look.", "thought": "", "query": [user("q")]}
    (rollout,), _, _ = read(document(tmp_path / "x.traj", {"trajectory": [step, step], "info": {}}))
    assert [turn.action for turn in rollout.turns] == ["I look."] * 2 and rollout.opening == [user("q")]


def test_every_attempt_is_a_rollout_and_the_verdict_is_of_the_chosen_one(tmp_path: Path) -> None:
    request = {"agent": {"model": {"name": "gpt-4o"}}, "problem_statement": {"id": INSTANCE, "text": "It breaks."}}
    attempt = {"history": history(), "info": INFO, "replay_config": json.dumps(request)}
    record = {"attempts": [attempt, attempt], "history": history(), "info": {"best_attempt_idx": 1}}
    document(tmp_path / "a.traj", record)
    document(tmp_path / "a.report.json", {"patch_exists": True, "resolved": True})
    rollouts, _, _ = read(tmp_path)
    assert [rollout.resolved for rollout in rollouts] == [None, True]
    assert {(rollout.model, rollout.task_id) for rollout in rollouts} == {("gpt-4o", INSTANCE)}


def test_instances_of_swe_bench_pro_are_judged_by_its_own_file(tmp_path: Path) -> None:
    """Their ids end in a commit: they were thrown away, and `eval_results.json` was a file of no format."""
    ids = [f"instance_a__b-{at:040x}-v{at:040x}" for at in range(3)]
    for name in ids:
        request = {"agent": {"model": {"name": "m"}}, "problem_statement": {"id": name, "text": "It breaks."}}
        attempt = {"history": history(), "trajectory": [], "info": INFO, "replay_config": json.dumps(request)}
        document(tmp_path / name / f"{name}.traj", attempt)
    document(tmp_path / "preds.json", {name: {"model_name_or_path": "m", "model_patch": "p"} for name in ids})
    judged = document(tmp_path / "eval_results.json", {ids[0]: True, ids[1]: False})
    rollouts, _, _ = read(tmp_path)
    assert {(rollout.task_id, rollout.resolved) for rollout in rollouts} == set(
        zip(ids, (True, False, None), strict=True)
    )
    alone, _, _ = read(judged)
    assert [(rollout.task_id, rollout.model, rollout.resolved) for rollout in alone] == [
        (ids[0], None, True),
        (ids[1], None, False),
    ]


@pytest.mark.parametrize("own", [sha256(b"It breaks.").hexdigest()[:6], None])
def test_an_id_that_is_made_of_the_text_is_none(tmp_path: Path, own: str | None) -> None:
    """Six digits of a digest: of a thousand tasks two would have the same."""
    request = {"problem_statement": {"id": own, "text": "It breaks.", "type": "text"}}
    document(tmp_path / "a.traj", {"history": history(), "info": INFO, "replay_config": request})
    (rollout,), _, _ = read(tmp_path)
    assert rollout.task_id.startswith("swe-agent/")
