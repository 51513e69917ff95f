"""Chat data sets under all their column names, rows without messages, and what a refusal says."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.transcripts import INSTANCE, PATCH, call, document, jsonl, payloads, read

CHAT = [
    {"role": "system", "content": "You fix."},
    {"role": "user", "content": "It breaks."},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("bash", '{"command": "ls"}')]},
    {"role": "tool", "content": "a.py"},
    {"role": "assistant", "content": "Done."},
]


def row(messages: Any = CHAT, key: str = "messages", **more: Any) -> dict[str, Any]:
    return {"instance_id": INSTANCE, key: messages, "resolved": True, **more}


@pytest.mark.parametrize("key", ["messages", "trajectory", "conversations"])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_messages_are_rollouts(tmp_path: Path, key: str, packed: bool) -> None:
    shown = json.dumps(CHAT) if packed else CHAT
    rows = [row(shown, key, patch=PATCH, model="m"), row(shown, key, resolved=False, traj_id="t2")]
    (one, two), drops, count = read(jsonl(tmp_path / "data.jsonl", *rows))
    assert (one.task_id, one.resolved, one.reward, one.model, one.submission) == (INSTANCE, True, 1.0, "m", PATCH)
    assert (one.family, one.env, two.reward, two.own_id) == ("owner/repo", "swe-bench", 0.0, "t2") and not drops
    assert [turn.action for turn in one.turns] == [
        'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
        "Done.",
    ]
    assert [m["role"] for m in one.opening] == ["system", "user"] and count.records == 2


def test_the_other_spelling_of_a_message_and_a_number_for_the_verdict(tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    found, _, _ = read(jsonl(tmp_path / "x.jsonl", row(chat, "conversations", resolved=1), row(chat, resolved=0.0)))
    assert [(one.resolved, one.turns[0].action) for one in found] == [(True, "a"), (False, "a")]
    assert found[0].opening == [{"role": "user", "content": "q"}]


def test_a_parquet_file_of_a_public_set(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])] * 2)
    pq.write_table(table, tmp_path / "train-00000.parquet")
    assert len(read(tmp_path)[0]) == 2


def test_an_empty_trajectory_is_a_rollout_that_failed_and_no_unknown_format(tmp_path: Path) -> None:
    found = payloads(jsonl(tmp_path / "x.jsonl", row([]), row([], "trajectory", resolved=False)))
    assert [p["rollout"]["error_type"] for p in found] == ["no_actions"] * 2
    assert [p["rollout"]["reward"] for p in found] == [None] * 2


@pytest.mark.parametrize(
    ("name", "record", "source"),
    [
        (f"{INSTANCE}.traj", {"trajectory": [], "history": [], "info": {"exit_status": "exit_error"}}, "swe-agent"),
        ("a.traj.json", {"messages": [], "info": {"exit_status": "Error"}, "instance_id": INSTANCE}, "mini-swe-agent"),
    ],
)
def test_empty_trajectories_of_other_programs_keep_their_format(
    tmp_path: Path, name: str, record: dict[str, Any], source: str
) -> None:
    (one,) = payloads(document(tmp_path / name, record))
    assert (one["rollout"]["source"], one["rollout"]["task_id"], one["steps"]) == (source, INSTANCE, [])
    assert one["rollout"]["reward"] is None


def test_a_verdict_that_is_none_is_malformed(tmp_path: Path) -> None:
    _, drops, _ = read(jsonl(tmp_path / "x.jsonl", row(), row(resolved="maybe")))
    assert [(d.line, d.reason) for d in drops] == [(2, "malformed_record")] and "'maybe'" in drops[0].detail


def test_a_refusal_lists_the_keys_that_it_saw(tmp_path: Path) -> None:
    _, drops, _ = read(jsonl(tmp_path / "x.jsonl", {"dialogue": [], "label": 1}))
    assert drops[0].reason == "unknown_format" and "its keys are dialogue, label" in drops[0].detail


def test_it_can_be_asked_for_by_name_and_takes_nobody_elses_files(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", row())
    assert len(read(path, "messages")[0]) == 1
    mini = {"messages": CHAT, "info": {"exit_status": "Submitted"}, "instance_id": INSTANCE}
    assert read(jsonl(tmp_path / "y.traj.json", mini), "messages")[1][0].reason == "unknown_format"
