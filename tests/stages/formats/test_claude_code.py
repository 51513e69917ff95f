"""Claude Code sessions: parts of one answer, parallel calls, branches, compaction, side chains, odd lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.transcripts import action, jsonl, payloads, read

from composer_stages.formats import claude_code
from composer_stages.formats.base import Drop, Origin
from composer_stages.formats.reports import Sidecars
from composer_stages.rollouts import missing


def line(uuid: str, parent: str | None, kind: str, message: Any, **more: Any) -> dict[str, Any]:
    about = {"sessionId": "s1", "cwd": "/work", "version": "2.1.0", "timestamp": "2026-01-01T00:00:00.000Z"}
    return {**about, "type": kind, "uuid": uuid, "parentUuid": parent, "isSidechain": False, "message": message, **more}


def user(uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    return line(uuid, parent, "user", {"role": "user", "content": content}, **more)


def says(uuid: str, parent: str | None, key: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 3, "cache_read_input_tokens": 100, "output_tokens": 7}
    message = {"id": key, "role": "assistant", "model": "claude-x", "content": list(parts), "usage": usage}
    return line(uuid, parent, "assistant", {**message, "stop_reason": more.pop("stop", None)}, **more)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def bash(call_id: str, command: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": {"command": command}}


def result(call_id: str, content: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": call_id, "content": content}]


SESSION = [
    {"type": "summary", "summary": "A fix", "leafUuid": "a4"},
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
    user("u1", None, "Fix it."),
    {"type": "attachment", "uuid": "x1", "parentUuid": "u1", "sessionId": "s1", "attachment": {"a": 1}},
    says("a1", "x1", "m1", {"type": "thinking", "thinking": "I look.", "signature": "zz"}),
    says("a2", "a1", "m1", bash("c1", "ls"), stop=None),
    says("a3", "a2", "m1", bash("c2", "pwd"), stop="tool_use"),
    user("r1", "a2", result("c1", "a.py"), toolUseResult={"stdout": "a.py"}),
    user("r2", "a3", result("c2", [text("/work"), {"type": "image", "source": {"data": "AAAA"}}])),
    says("a4", "r2", "m2", text("Done."), stop="end_turn", timestamp="2026-01-01T00:00:09.500Z"),
]


@pytest.mark.parametrize("second_first", [False, True])
def test_an_answer_on_several_lines_is_one_action_with_all_its_results(tmp_path: Path, second_first: bool) -> None:
    order = [0, 1, 2, 3, 4, 5, 6, *((8, 7) if second_first else (7, 8)), 9]  # of calls that run at the same time
    (rollout,), drops, count = read(jsonl(tmp_path / "s1.jsonl", *(SESSION[number] for number in order)))
    calls = (("Bash", json.dumps({"command": command})) for command in ("ls", "pwd"))
    assert [turn.action for turn in rollout.turns] == [action("", *calls, thought="I look."), "Done."]
    assert [m["content"] for m in rollout.turns[0].observed] == ["a.py", "/work\n[omitted: image]"]
    assert (rollout.turns[0].commands, rollout.turns[0].finish_reason) == (["ls", "pwd"], "tool_calls")
    assert (rollout.turns[0].prompt_tokens, rollout.turns[0].completion_tokens) == (103, 7)
    assert rollout.opening == [{"role": "user", "content": "Fix it."}] and rollout.turns[1].finish_reason == "stop"
    assert (rollout.own_id, rollout.model, rollout.wall_s, rollout.error) == ("s1", "claude-x", 9.5, None)
    assert not drops and count.records == 1


def test_facts_that_a_session_lacks_are_listed_as_missing(tmp_path: Path) -> None:
    (row,) = payloads(jsonl(tmp_path / "s1.jsonl", *SESSION))
    lacks = {missing.REWARD, missing.OPENING, missing.TOKENS, missing.LOGPROBS, missing.MEDIA}
    assert row["rollout"]["reward"] is None and lacks <= set(row["origin"]["missing"])
    assert missing.FINISH not in row["origin"]["missing"]


def test_an_edited_request_is_a_branch_whose_shared_actions_are_context(tmp_path: Path) -> None:
    again = [user("u2", "a4", "And tests."), says("a5", "u2", "m3", text("Tests.")), user("u3", "a4", "No tests.")]
    rollouts, _, _ = read(jsonl(tmp_path / "s1.jsonl", *SESSION, *again, says("a6", "u3", "m4", text("Fine."))))
    last, first = rollouts
    assert [turn.action for turn in last.turns][1:] == ["Done.", "Fine."] and last.own_id == "s1"
    assert [turn.action for turn in first.turns] == ["Tests."] and first.own_id == "s1/m3"
    assert last.turns[1].observed == [{"role": "user", "content": "No tests."}]
    assert [m["content"] for m in first.opening][-2:] == ["Done.", "And tests."]
    assert first.opening[1]["role"] == "assistant" and len(first.opening) == 6


def test_compaction_and_sub_agents_begin_new_rollouts(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "w"}
    more = [
        user("p1", "a2", "Search.", **side),
        says("p2", "p1", "m5", text("Found."), **side),
        {"type": "system", "subtype": "compact_boundary", "uuid": "k", "parentUuid": None, "logicalParentUuid": "a4"},
        user("k1", "k", "So far: fixed.", isCompactSummary=True),
        says("k2", "k1", "m6", text("Going on.")),
    ]
    rollouts, drops, _ = read(jsonl(tmp_path / "s1.jsonl", *SESSION, *more))
    assert [rollout.own_id for rollout in rollouts] == ["s1", "s1/m2", "s1/w/m5"] and not drops
    assert [rollout.opening[0]["content"] for rollout in rollouts] == ["So far: fixed.", "Fix it.", "Search."]
    assert [len(rollout.turns) for rollout in rollouts] == [1, 2, 1]
    assert [rollout.extra["sidechain"] for rollout in rollouts] == [False, False, True]


def test_a_failed_request_at_the_end_is_an_error_and_no_action(tmp_path: Path) -> None:
    record = {"role": "assistant", "model": "<synthetic>", "content": [text("API Error: 529")]}
    failed = line("e", "a4", "assistant", record, isApiErrorMessage=True)
    (rollout,), _, _ = read(jsonl(tmp_path / "s1.jsonl", *SESSION, failed))
    assert rollout.error == ("api_error", "API Error: 529") and len(rollout.turns) == 2


def test_broken_lines_are_dropped_one_by_one(tmp_path: Path) -> None:
    bad = ["{", user("u9", None, 5), says("a9", "u1", "m9", "no part"), [1], {"type": "user", "sessionId": "s1"}]  # type: ignore[arg-type]
    rollouts, drops, _ = read(jsonl(tmp_path / "s1.jsonl", *SESSION, *bad))
    assert len(rollouts) == 1 and [drop.reason for drop in drops] == ["not_json", *["malformed_line"] * 4]
    assert [drop.line for drop in drops] == [11, 12, 13, 14, 15]


def test_circular_lines_and_sessions_without_answers_are_dropped(tmp_path: Path) -> None:
    circle = [user("u1", "u2", "a"), user("u2", "u1", "b"), says("a1", "u2", "m1", text("x"))]
    for name, lines, reason in (("a", circle, "malformed_record"), ("b", SESSION[:3], "no_actions")):
        rollouts, drops, _ = read(jsonl(tmp_path / f"{name}.jsonl", *lines), "claude-code")
        assert not rollouts and [drop.reason for drop in drops] == [reason]


def test_a_chain_of_answers_that_name_each_other_is_dropped(tmp_path: Path) -> None:
    lines = [says("a1", "b1", "m1", text("x")), says("b1", "a1", "m2", text("y")), says("c", None, "m3", text("z"))]
    lines.append(says("d", "b1", "m4", text("w")))
    rollouts, drops, _ = read(jsonl(tmp_path / "a.jsonl", *lines))
    assert not rollouts and "own ancestor" in drops[0].detail


def test_a_long_chain_of_lines_takes_no_recursion(tmp_path: Path) -> None:
    lines = [user("0", None, "Go.")]
    lines += [{"type": "progress", "uuid": str(n), "parentUuid": str(n - 1), "sessionId": "s"} for n in range(1, 2000)]
    (rollout,), _, _ = read(jsonl(tmp_path / "a.jsonl", *lines, says("a", "1999", "m", text("x"))))
    assert rollout.opening == [{"role": "user", "content": "Go."}]


def test_lines_after_the_limit_of_a_session_are_dropped() -> None:
    link = {"type": "progress", "uuid": "x", "sessionId": "s"}
    cut, session = claude_code.join(((n, link) for n in range(1, 9)), lambda *fields: Drop("f", *fields), limit=5)
    assert isinstance(cut, Drop) and (cut.reason, cut.line) == ("session_too_long", 6)
    assert isinstance(session, tuple) and len(session[1][claude_code.SESSION]) == 5


def test_branches_after_the_limit_of_answers_are_dropped() -> None:
    trunk = [says(str(n), str(n - 1), f"m{n}", text("x")) for n in range(20)]
    twigs = [says(f"t{n}", "19", f"t{n}", text("y")) for n in range(11)]
    ((_, record),) = claude_code.join(enumerate([*trunk, *twigs], 1), lambda *fields: Drop("f", *fields))  # type: ignore[misc]
    origin = Origin(Path("s.jsonl"), "s.jsonl", "", 1, Sidecars())
    rollouts = list(claude_code.trajectories(record, origin, limit=200))
    assert [isinstance(rollout, Drop) for rollout in rollouts] == [False] * 10 + [True]
    assert sum(len(rollout.turns) for rollout in rollouts if not isinstance(rollout, Drop)) == 30


def test_the_task_id_depends_on_the_question(tmp_path: Path) -> None:
    changed = json.loads(json.dumps(SESSION).replace("Fix it.", "Fix that."))
    (first,), (second,) = (read(jsonl(tmp_path / n, *s))[0] for n, s in (("a.jsonl", SESSION), ("b.jsonl", changed)))
    assert first.task_id != second.task_id and first.task_id.startswith("claude-code/")
