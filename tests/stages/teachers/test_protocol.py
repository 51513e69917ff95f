"""Teachers behind servers that take nothing beyond the protocol: tools, reasoning, pictures, and what a probe finds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.server import Reply, answer, serving, strict
from support.transcripts import imported, jsonl

from composer_stages import messages, replay_teachers
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.kinds import STEP, TEACHER_ACTION
from composer_stages.runs.run import Run

SEARCH = {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "toolu_1", "type": "function", "function": function}


@pytest.fixture(scope="module")
def rollouts(artifacts: Path) -> Run:
    """One imported rollout with tools, reasoning and a picture, and one whose source declared no tools."""
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Which boat?"}, PICTURE]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call("search", query="a")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "nothing"},
        {"role": "assistant", "content": "Once more.", "tool_calls": [call("search", query="b")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Utsuro-bune"},
        {"role": "assistant", "content": "Utsuro-bune."},
    ]
    plain = [{"role": "user", "content": "Which ship?"}, *conversation[1:]]
    tools = [{"type": "function", "function": SEARCH}]
    boat = {"messages": conversation, "task_id": "boat", "reward": 1.0, "tools": tools}
    ship = {"messages": plain, "task_id": "ship", "reward": 0.0}
    return imported(artifacts, jsonl(artifacts / "rows.jsonl", boat, ship))


def replay(root: Path, rollouts: Run, url: str, **more: Any) -> Run:
    table = [{"name": "one", "model": "one", "base_url": url, "max_tokens": 64, **more}]
    config = replay_teachers.Config(teachers=table)
    return Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root).path)


def searching(body: dict[str, Any], earlier: int) -> Reply:
    """Thinks, then calls the tool where there is one."""
    del earlier
    said = answer("I do not know.", cost=0.01)
    if body.get("tools"):
        message = {"content": "", "reasoning_content": "Let me see.", "tool_calls": [call("search", query="c")]}
        said["choices"][0] = {"finish_reason": "tool_calls", "message": message}
    return Reply(body=said)


def test_a_strict_server_accepts_every_rollout(tmp_path: Path, rollouts: Run) -> None:
    with serving(strict(searching), probed=strict(searching)) as server:
        run = replay(tmp_path, rollouts, server.url)
    rows = run.rows(TEACHER_ACTION)
    assert len(rows) == len(server.requests) == len(rollouts.rows(STEP)) == 6
    assert all(row["error_type"] is None for row in rows)
    assert run.manifest.models["one"]["accepts"]["capture_level"] == "text"
    (boat,) = {row["rollout_id"] for row in rows if row["task_id"] == "boat"}
    for row in rows:
        calls = messages.read(row["action"]).calls
        assert [c.name for c in calls] == (["search"] if row["rollout_id"] == boat else [])
        assert row["reasoning"] == ("Let me see." if calls else None)
    sent = [body for body in server.requests if body.get("tools")]
    assert {message["role"] for body in sent for message in body["messages"]} == {"user", "assistant", "tool"}
    assert not any("Hm." in json.dumps(body) for body in server.requests), "the student's reasoning is not sent"
    # Pictures are a declared gap.
    assert run.manifest.counts["states_with_media"] == 3
    assert "3 states had pictures or sounds" in (run.path / "report.txt").read_text()


def without(*fields: str) -> Callable[[dict[str, Any], int], Reply]:
    """A server that does not know some fields."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        unknown = [name for name in fields if name in body]
        return Reply(400, {"error": {"message": f"unknown {unknown}"}}) if unknown else strict(searching)(body, earlier)

    return reply


def test_refused_request_fields_are_omitted(tmp_path: Path, rollouts: Run) -> None:
    odd = without("seed", "tools")
    with serving(odd, probed=odd) as server:
        run = replay(tmp_path, rollouts, server.url)
    assert len(server.probes) == 4, "all at once, then each alone"
    assert not any({"seed", "tools"} & body.keys() for body in server.requests)
    accepts = run.manifest.models["one"]["accepts"]
    assert (accepts["seed"], accepts["tools"], accepts["logprobs"]) == (False, False, True)
    assert all(row["error_type"] is None for row in run.rows(TEACHER_ACTION))
    assert "one takes no seed, tools" in (run.path / "report.txt").read_text()


def test_a_run_is_probed_and_pays_for_it_once(tmp_path: Path, rollouts: Run) -> None:
    def telling(body: dict[str, Any], earlier: int) -> Reply:
        said = answer("OK", cost=0.125)
        if body.get("logprobs"):
            said["choices"][0]["logprobs"] = {"content": [{"token": "OK", "logprob": -0.1}]}
        return Reply(body=said)

    with serving(searching, probed=telling) as server:
        run = replay(tmp_path, rollouts, server.url)
        replay(tmp_path, rollouts, server.url, max_attempts=2)
        assert (len(server.probes), len(server.requests)) == (1, 6)
    assert run.manifest.models["one"]["accepts"]["capture_level"] == "logprobs"
    answered = sum(row["cost_usd"] for row in run.rows(TEACHER_ACTION))
    assert run.manifest.cost_usd == pytest.approx(answered + 0.125), "a probing call is paid like every other"


def test_a_probe_that_is_refused_for_good_stops_before_any_question(tmp_path: Path, rollouts: Run) -> None:
    refused = Reply(401, {"error": {"message": "bad key"}})
    with serving(searching, probed=lambda body, n: refused) as server:
        with pytest.raises(UsageError, match="key was refused"):
            replay(tmp_path, rollouts, server.url)
        assert not server.requests
