"""Inspect logs: documents and archives, attachments, scores, tool calls."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from support.transcripts import action, assistant, document, payloads, read, tool, user

EVAL = {"task": "popularity", "model": "openai/m", "scorers": [{"name": "match"}]}
EVAL |= {"model_generate_config": {"temperature": 0.5}}


def sample(number: int = 1, value: Any = "C", **more: Any) -> dict[str, Any]:
    input_messages = [user("attachment://abc"), assistant("given"), user("go on")]
    calls = [{"id": "1", "function": "bash", "arguments": {"cmd": "ls"}, "parse_error": None}]
    parts = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Yes"}]
    messages = [
        *({**item, "source": "input"} for item in input_messages),
        assistant(parts, tool_calls=calls, source="generate"),
        tool("", tool_call_id="1", error={"type": "timeout", "message": "too slow"}),
        assistant("No", source="generate"),
    ]
    output = {"choices": [{"stop_reason": "max_tokens"}], "usage": {"input_tokens": 4, "output_tokens": 1}, "time": 0.5}
    usage = {"openai/m": {"input_tokens": 8, "output_tokens": 2}, "judge": {"input_tokens": 99}}
    scores = {"other": {"value": 0.2}, "match": {"value": value}}
    request = {"id": number, "epoch": 1, "input": "attachment://abc", "target": " Yes", "messages": messages}
    fields = {"output": output, "scores": scores, "attachments": {"abc": "What is it?"}, "events": []}
    return {**request, **fields, "model_usage": usage, **more}


def log(*samples: dict[str, Any]) -> dict[str, Any]:
    about = {"version": 2, "status": "success", "eval": EVAL, "plan": {"config": {"max_tokens": 5}}}
    return {**about, "samples": list(samples)}


def test_a_sample_is_a_rollout(tmp_path: Path) -> None:
    (rollout,), drops, _ = read(document(tmp_path / "log.json", log(sample())))
    assert [m["content"] for m in rollout.opening] == ["What is it?", "given", "go on"] and not drops
    assert rollout.turns[0].action == action("Yes", ("bash", '{"cmd": "ls"}'), thought="hm")
    assert rollout.turns[0].observed == [{"role": "tool", "content": "too slow"}] and rollout.statement == "What is it?"
    assert (rollout.model, rollout.task_id) == ("openai/m", "popularity/1")
    assert (rollout.reward, rollout.prompt_tokens) == (1.0, 8)
    assert [turn.finish_reason for turn in rollout.turns] == [None, "length"]
    assert rollout.sampling == {"temperature": 0.5, "max_tokens": 5}


def test_scores_are_numbers_by_inspects_own_rule(tmp_path: Path) -> None:
    rewards = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "0.5": 0.5, "hm": None}
    values = [*rewards.items(), (True, 1.0), (0.25, 0.25), ({"a": 1}, 1.0), ({"a": 1, "b": 0}, None)]
    samples = [sample(number, value) for number, (value, _) in enumerate(values)]
    rollouts, _, _ = read(document(tmp_path / "log.json", log(*samples)))
    assert [rollout.reward for rollout in rollouts] == [reward for _, reward in values]


def test_finish_reasons_and_usage_come_from_model_events(tmp_path: Path) -> None:
    def event(stop: str) -> dict[str, Any]:
        output = {"choices": [{"stop_reason": stop}], "usage": {"input_tokens": 3, "output_tokens": 1}}
        return {"event": "model", "output": output}

    events = [event("tool_calls"), {"event": "tool"}, event("stop")]
    (rollout,), _, _ = read(document(tmp_path / "log.json", log(sample(events=events))))
    assert [turn.finish_reason for turn in rollout.turns] == ["tool_calls", "stop"]
    assert rollout.turns[0].completion_tokens == 1


def test_failed_samples_are_errors_and_logs_without_samples_drops(tmp_path: Path) -> None:
    document(tmp_path / "a.json", log(sample(error={"message": "died", "traceback": ""})))
    document(tmp_path / "b.json", {**log(), "status": "cancelled"})
    rollouts, drops, _ = read(tmp_path)
    assert [rollout.error for rollout in rollouts] == [("error", "died")]
    assert [drop.reason for drop in drops] == ["log_without_samples"]


def test_a_sample_that_a_person_invalidated_has_no_verdict(tmp_path: Path) -> None:
    invalidated = sample(invalidation={"timestamp": "2026-01-01T00:00:00Z", "author": "someone", "reason": "it leaked"})
    (rollout, second), _, _ = read(document(tmp_path / "a.json", log(invalidated, sample(2, invalidation=None))))
    assert rollout.error == ("invalidated", "it leaked") and second.error is None
    (row, _) = payloads(tmp_path / "a.json")
    assert row["rollout"]["reward"] is None and {step["reward"] for step in row["steps"]} == {None}


def archive(path: Path, samples: Mapping[int, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """A log with these bytes as samples of these ids."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("header.json", json.dumps({"version": 2, "eval": EVAL, "plan": {}}))
        for number, content in samples.items():
            file.writestr(f"samples/{number}_epoch_1.json", content)
    return path


def test_an_archive_gives_the_same_as_a_document_but_for_a_damaged_sample(tmp_path: Path) -> None:
    raw = {number: json.dumps(sample(number)).encode() for number in (1, 2)}
    path = archive(tmp_path / "log.eval", {**raw, 3: b'{"id": 3, "mess'})
    complete = document(tmp_path / "log.json", log(sample(1), sample(2)))
    keys = ("action", "observation", "state_sha256", "finish_reason")
    packed, plain = (
        [[[s[k] for k in keys] for s in p["steps"]] for p in payloads(payload)] for payload in (path, complete)
    )
    assert packed == plain
    assert [(drop.reason, drop.line) for drop in read(path)[1]] == [("damaged_record", 3)]


def test_an_archive_compressed_with_zstandard(tmp_path: Path) -> None:
    squeezed = bytes(pa.compress(json.dumps(sample(1)).encode(), codec="zstd", asbytes=True))
    path, name = archive(tmp_path / "log.eval", {1: squeezed}, zipfile.ZIP_STORED), "samples/1_epoch_1.json"
    data = path.read_bytes()
    at, central = data.index(name.encode()) - 30, data.rindex(name.encode()) - 46
    marked = bytearray(data)
    marked[at + 8 : at + 10] = marked[central + 10 : central + 12] = (93).to_bytes(2, "little")
    path.write_bytes(bytes(marked))
    (rollout,), drops, _ = read(path)
    assert len(rollout.turns) == 2 and not drops
