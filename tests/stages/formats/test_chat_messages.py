"""Chat data sets under all their column names, rows without messages, and what a refusal says."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import (
    INSTANCE,
    PATCH,
    action,
    assistant,
    call,
    document,
    imported,
    jsonl,
    payloads,
    read,
    system,
    tool,
    user,
)

from composer_stages.runs.kinds import ROLLOUT

LOOK = "bash", '{"command": "ls"}'
CHAT = [system("You fix."), user("It breaks."), assistant("I look.", tool_calls=[call(*LOOK)]), tool("a.py")]
CHAT.append(assistant("Done."))


def row(messages: Any = CHAT, key: str = "messages", **more: Any) -> dict[str, Any]:
    return {"instance_id": INSTANCE, key: messages, "resolved": True, **more}


@pytest.mark.parametrize("key", ["messages", "trajectory", "conversations"])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_messages_are_rollouts(tmp_path: Path, key: str, packed: bool) -> None:
    messages = json.dumps(CHAT) if packed else CHAT
    rows = [row(messages, key, patch=PATCH, model="m"), row(messages, key, resolved=False, traj_id="t2")]
    (rollout, two), drops, count = read(jsonl(tmp_path / "data.jsonl", *rows))
    assert (rollout.task_id, rollout.submission) == (INSTANCE, PATCH)
    assert (rollout.resolved, rollout.reward, rollout.model) == (True, 1.0, "m")
    assert (rollout.family, rollout.env, two.reward, two.own_id) == ("owner/repo", "swe-bench", 0.0, "t2") and not drops
    assert [turn.action for turn in rollout.turns] == [action("I look.", LOOK), "Done."]
    assert [m["role"] for m in rollout.opening] == ["system", "user"] and count.records == 2


def test_from_value_messages_and_numeric_verdicts_are_read(tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rollouts, _, _ = read(jsonl(tmp_path / "x.jsonl", row(chat, "conversations", resolved=1), row(chat, resolved=0.0)))
    assert [(rollout.resolved, rollout.turns[0].action) for rollout in rollouts] == [(True, "a"), (False, "a")]
    assert rollouts[0].opening == [user("q")]


@pytest.mark.parametrize("mask", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_messages_that_are_not_trained_on_are_context(tmp_path: Path, mask: dict[str, Any]) -> None:
    call_of_another = {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {}}), **mask}
    chat = [
        user("q"),
        {**assistant("wrong"), **mask},
        user("no"),
        {**assistant("right"), **dict.fromkeys(mask, True)},
        call_of_another,
    ]
    rollout, masked = read(jsonl(tmp_path / "x.jsonl", row(chat), row([user("q"), {**assistant("a"), **mask}])))[0]
    assert [message["content"] for message in rollout.opening] == ["q", "wrong", "no"]
    assert [(turn.action, len(turn.observed)) for turn in rollout.turns] == [("right", 1)]
    assert (masked.turns, masked.resolved, masked.reward, masked.error) == ([], True, 1.0, None)


@pytest.mark.parametrize("key", ["run_id", "traj_id"])
def test_the_id_of_a_run_is_none_of_its_rollouts(tmp_path: Path, key: str) -> None:
    ids = [7, 7, 7] if key == "run_id" else [7, 8, 9]
    rows = [row(**{key: name}) | {"instance_id": f"owner__repo-{n}"} for n, name in enumerate(ids)]
    run = imported(tmp_path, jsonl(tmp_path / "data" / "x.jsonl", *rows))
    assert [rollout["task_id"] for rollout in run.scan(ROLLOUT).rows()] == [each["instance_id"] for each in rows]


CALLED = '{"name": "bash", "arguments": {"command": "ls"}}'
BLOCKS = {"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}}, {"type": "tool_result"}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (("from", "value"), [("system", "s"), ("human", "q"), ("function_call", CALLED), ("observation", "out")]),
        (("role", "content"), [("System", "s"), ("User", "q"), ("tool_call", f"[{CALLED}]"), ("tool_response", "out")]),
        (("role", "text"), [("system", "s"), ("user", "q"), ("ai", CALLED), ("environment", "out")]),
        (("role", "content"), [("system", "s"), ("user", "q"), ("assistant", [BLOCKS[0]]),
            ("user", [{**BLOCKS[1], "tool_use_id": "1", "content": "out"}])]),
    ],
    ids=["ShareGPT", "capitals", "text", "Anthropic"],
)  # fmt: skip
def test_messages_of_other_dialects_keep_their_roles_and_texts(
    tmp_path: Path, key: tuple[str, str], said: list[tuple[str, Any]]
) -> None:
    chat = [dict(zip(key, entry, strict=True)) for entry in said]
    ((rollout,), drops, _) = read(jsonl(tmp_path / "x.jsonl", row(chat)))
    assert rollout.opening == [system("s"), user("q")] and not drops
    (turn,) = rollout.turns
    assert turn.action == (CALLED if key[1] == "text" else action("", ("bash", '{"command": "ls"}')))
    assert turn.observed == [{"role": "tool", "content": "out"}]


@pytest.mark.parametrize(
    "strange", [{"role": "critic", "content": "No."}, {"role": "user", "body": "q"}, {"role": "user", "message": "q"}]
)
def test_a_role_or_a_text_under_an_unknown_name_is_named(tmp_path: Path, strange: dict[str, str]) -> None:
    rollouts, (drop,), _ = read(jsonl(tmp_path / "x.jsonl", row([*CHAT, strange])))
    assert not rollouts and drop.reason == "malformed_record"
    assert ("critic" if "content" in strange else [*strange][1]) in drop.detail


EMPTY: dict[str, tuple[str, dict[str, Any], str]] = {
    "a row of messages": ("x.jsonl", row([]), "messages"),
    "a row of a trajectory": ("x.jsonl", row([], "trajectory", resolved=False), "messages"),
    "swe-agent": (f"{INSTANCE}.traj", {"trajectory": [], "history": [], "info": {"exit_status": "error"}}, "swe-agent"),
    "mini-swe-agent": ("a.traj.json", {**row([]), "info": {"exit_status": "Error"}}, "mini-swe-agent"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_trajectory_is_a_failed_rollout(tmp_path: Path, name: str) -> None:
    file, record, source = EMPTY[name]
    (payload,) = payloads(document(tmp_path / file, record, indent=None))
    expected = {"source": source, "task_id": INSTANCE, "error_type": "no_actions", "reward": None}
    assert payload["rollout"] | expected == payload["rollout"] and payload["steps"] == []


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        (row(resolved="maybe"), "malformed_record", "'maybe'"),
        ({"dialogue": [], "label": 1}, "foreign_record", "its keys are dialogue, label"),
    ],
)
def test_a_dropped_record_is_described_by_its_keys_or_value(
    tmp_path: Path, record: dict[str, Any], reason: str, words: str
) -> None:
    _, (drop,), _ = read(jsonl(tmp_path / "x.jsonl", row(), record))
    assert (drop.line, drop.reason) == (2, reason) and words in drop.detail


def test_a_format_by_name_reads_no_other_formats_files(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", row())
    assert len(read(path, "messages")[0]) == 1
    mini = {"messages": CHAT, "info": {"exit_status": "Submitted"}, "instance_id": INSTANCE}
    assert read(jsonl(tmp_path / "y.traj.json", mini), "messages")[1][0].reason == "unknown_format"
