"""Inspect logs: documents and archives, attachments, scores, tool calls."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.refusals import refused
from support.transcripts import action, assistant, document, payloads, read, tool, user

from composer_stages.comparison import logs
from composer_stages.errors import BadInput
from composer_stages.formats.measurement import State
from composer_stages.runs import store

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


@pytest.mark.parametrize(("input_tokens", "total", "read_tokens"), [(8, 60, 58), (58, 60, 58), (8, 10, 8), (8, 0, 8)])
def test_tokens_of_a_cache_are_tokens_read(tmp_path: Path, input_tokens: int, total: int, read_tokens: int) -> None:
    """Beside `input_tokens` (Inspect 0.3.237), or among them, as older versions count those of OpenAI."""
    usage = {"input_tokens": input_tokens, "output_tokens": 2, "total_tokens": total}
    usage |= {"input_tokens_cache_read": 40, "input_tokens_cache_write": 10}
    output = {"choices": [{"stop_reason": "stop"}], "usage": usage}
    played = sample(model_usage={"openai/m": usage}, output=output)
    (rollout,), _, _ = read(document(tmp_path / "log.json", log(played)))
    assert rollout.prompt_tokens == rollout.turns[-1].prompt_tokens == read_tokens


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
    assert (rollout.measured.state, second.measured.state) == (State.INVALID, State.SCORED)
    (row, _) = payloads(tmp_path / "a.json")
    assert row["rollout"]["reward"] is None and {step["reward"] for step in row["steps"]} == {None}


def archive(path: Path, samples: Mapping[int, bytes], compression: int = zipfile.ZIP_DEFLATED, **header: Any) -> Path:
    """A log with these bytes as samples of these ids."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("header.json", json.dumps({"version": 2, "eval": EVAL, "plan": {}, **header}))
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


def in_chunks(path: Path, samples: Mapping[str, dict[str, Any]], size: int = 2) -> Path:
    """A log as `inspect log convert-chunked` of inspect_ai 0.3.285 writes it: a folder of chunks a sample."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"version": 2, "status": "success", "eval": EVAL, "plan": {}}))
        for name, whole in samples.items():
            shell = {key: value for key, value in whole.items() if key not in ("messages", "events", "attachments")}
            attached, pool = (
                [*whole["attachments"].values()],
                [{"role": "user", "content": "spare"}, *whole["messages"]],
            )
            parts = {"messages": pool, "events": whole["events"], "attachments": attached, "calls": [{}] * 3}
            file.writestr(f"samples/{name}_epoch_1/metadata.json", json.dumps(shell.pop("metadata", {})))
            shell |= {"message_refs": [[1, 3], [3, len(pool)]], "input": "attachment://0"}
            file.writestr(f"samples/{name}_epoch_1/sample.json", json.dumps(shell))
            for part, items in parts.items():
                for start in range(0, len(items), size):
                    text = json.dumps(items[start : start + size]).replace("attachment://abc", "attachment://0")
                    file.writestr(f"samples/{name}_epoch_1/{part}/{start}.json", text)
            file.writestr(f"samples/{name}_epoch_1/events/stats.json", '{"chunks": []}')
            file.writestr(f"samples/{name}_epoch_1/skeleton.json", "{}")
    return path


def test_a_sample_in_chunks_is_that_of_one_document(tmp_path: Path) -> None:
    output = {"choices": [{"stop_reason": "stop"}], "usage": {"input_tokens": 3, "output_tokens": 1}}
    whole = sample(events=[{"event": "model", "output": output}] * 2, metadata={"document": "d1"})
    names = {"1": whole, "a/b": {**whole, "id": "a/b"}}
    rollouts, drops, _ = read(in_chunks(tmp_path / "log.eval", names))
    plain, _, _ = read(document(tmp_path / "log.json", log(*names.values())))
    assert len(rollouts) == 2 and not drops
    for chunked, one in zip(rollouts, plain, strict=True):
        assert [vars(turn) for turn in chunked.turns] == [vars(turn) for turn in one.turns] and len(one.turns) == 2
        assert (chunked.opening, chunked.task_data, chunked.task_id) == (one.opening, one.task_data, one.task_id)


def test_a_comparison_reads_summaries_in_the_place_of_transcripts(tmp_path: Path) -> None:
    """But for the first sample, what was shortened, our own samples, an invalidated log, and for a column of units."""
    short = {"error": "E('x')", "limit": "token"}
    samples = [sample(at, "CI"[at % 2], uuid=f"u{at}", input=f"What is {at}?", attachments={}) for at in range(8)]
    summaries = [
        {key: item[key] for key in ("id", "epoch", "input", "target", "scores", "uuid")}
        | {"message_count": 6, "metadata": {}}
        for item in samples
    ]
    summaries[5] |= short
    summaries[6]["input"] = samples[6]["input"] = "long"
    summaries[6]["input"] += "...\n(content truncated)"
    summaries[7]["metadata"] = {"composer": True}
    for layout, entries in (
        ("whole", {"summaries.json": summaries}),
        ("running", {f"_journal/summaries/{at + 1}.json": [summary] for at, summary in enumerate(summaries)}),
        (
            "again",
            {"_journal/summaries/9.json": [{**summaries[2], "scores": {}}], "_journal/summaries/10.json": summaries},
        ),
    ):
        path = archive(tmp_path / f"{layout}.eval", {at: json.dumps(item).encode() for at, item in enumerate(samples)})
        documents = {at: json.dumps(samples[at]).encode() if at in (0, 6, 7) else b"{" for at in range(8)}
        spoilt = archive(tmp_path / f"spoilt-{layout}.eval", documents)
        damaged = archive(tmp_path / f"damaged-{layout}.eval", {**documents, 6: b"{"})
        for file in (path, spoilt, damaged):
            with zipfile.ZipFile(file, "a") as packed:
                for name, content in entries.items():
                    packed.writestr(name, json.dumps(content))
            if file is damaged:
                refused(lambda file=file: logs.read(str(file)), BadInput, "samples/6", code="comparison.unreadable")
                continue
            items = logs.read(str(file)).items.to_pylist()
            assert [row["task"] for row in items] == [f"popularity/{item['id']}" for item in samples]
            assert [row["question"] for row in items] == [store.digest(item["input"].split())[:16] for item in samples]
        scores = logs.read(str(path)).scores["match"].to_pylist()
        assert scores == [1 - at % 2 for at in range(8)] and logs.read(str(path)).items["reason"][5].as_py() is not None
        assert all(turn.action for rollout in read(path)[0] for turn in rollout.turns), "an import has the transcripts"
    marked = archive(tmp_path / "invalidated.eval", {0: json.dumps(samples[0]).encode(), 1: b"{"}, invalidated=True)
    with zipfile.ZipFile(marked, "a") as packed:
        packed.writestr("summaries.json", json.dumps(summaries))
    refused(lambda: logs.read(str(marked)), BadInput, "samples/1", code="comparison.unreadable")


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
