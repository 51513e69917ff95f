"""Inspect logs: documents and archives, attachments, scores, tool calls."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from needs import REAL, needs
from support.transcripts import document, payloads, read

EVAL = {
    "task": "popularity",
    "model": "openai/m",
    "scorers": [{"name": "match"}],
    "model_generate_config": {"temperature": 0.5},
}


def sample(number: int = 1, value: Any = "C", **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "attachment://abc", "source": "input"},
        {"role": "assistant", "content": "given", "source": "input"},
        {"role": "user", "content": "go on", "source": "input"},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Yes"}],
            "tool_calls": [{"id": "1", "function": "bash", "arguments": {"cmd": "ls"}, "parse_error": None}],
            "source": "generate",
        },
        {"role": "tool", "content": "", "tool_call_id": "1", "error": {"type": "timeout", "message": "too slow"}},
        {"role": "assistant", "content": "No", "source": "generate"},
    ]
    output = {"choices": [{"stop_reason": "max_tokens"}], "usage": {"input_tokens": 4, "output_tokens": 1}, "time": 0.5}
    return {
        "id": number,
        "epoch": 1,
        "input": "attachment://abc",
        "target": " Yes",
        "messages": messages,
        "output": output,
        "scores": {"other": {"value": 0.2}, "match": {"value": value}},
        "attachments": {"abc": "What is it?"},
        "events": [],
        "model_usage": {"openai/m": {"input_tokens": 8, "output_tokens": 2}, "judge": {"input_tokens": 99}},
        **more,
    }


def log(*samples: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 2,
        "status": "success",
        "eval": EVAL,
        "plan": {"config": {"max_tokens": 5}},
        "samples": list(samples),
    }


def test_a_sample_is_a_rollout(tmp_path: Path) -> None:
    (one,), drops, _ = read(document(tmp_path / "log.json", log(sample())))
    assert [m["content"] for m in one.opening] == ["What is it?", "given", "go on"] and not drops
    assert (
        one.turns[0].action
        == '<think>\nhm\n</think>\n\nYes\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
    )
    assert one.turns[0].observed == [{"role": "tool", "content": "too slow"}] and one.statement == "What is it?"
    assert (one.reward, one.model, one.task_id, one.prompt_tokens) == (1.0, "openai/m", "popularity/1", 8)
    assert [turn.finish_reason for turn in one.turns] == [None, "length"] and one.sampling == {
        "temperature": 0.5,
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ("C", 1.0),
        ("P", 0.5),
        ("I", 0.0),
        ("N", 0.0),
        ("yes", 1.0),
        (True, 1.0),
        (0.25, 0.25),
        ("0.5", 0.5),
        ("hm", None),
        ({"a": 1}, None),
    ],
)
def test_scores_are_numbers_by_inspects_own_rule(tmp_path: Path, value: Any, reward: float | None) -> None:
    (one,), _, _ = read(document(tmp_path / "log.json", log(sample(value=value))))
    assert one.reward == reward


def test_ends_and_usage_of_every_turn_come_from_the_models_events(tmp_path: Path) -> None:
    def event(stop: str) -> dict[str, Any]:
        return {
            "event": "model",
            "output": {"choices": [{"stop_reason": stop}], "usage": {"input_tokens": 3, "output_tokens": 1}},
        }

    (one,), _, _ = read(
        document(tmp_path / "log.json", log(sample(events=[event("tool_calls"), {"event": "tool"}, event("stop")])))
    )
    assert [turn.finish_reason for turn in one.turns] == ["tool_calls", "stop"] and one.turns[0].completion_tokens == 1


def test_samples_that_failed_and_logs_without_samples(tmp_path: Path) -> None:
    document(tmp_path / "a.json", log(sample(error={"message": "died", "traceback": ""})))
    document(tmp_path / "b.json", {**log(), "status": "cancelled"})
    found, drops, _ = read(tmp_path)
    assert [one.error for one in found] == [("error", "died")] and [drop.reason for drop in drops] == [
        "log_without_samples"
    ]


def archive(path: Path, *samples: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps({"version": 2, "eval": EVAL, "plan": {}}))
        for one in samples:
            file.writestr(f"samples/{one['id']}_epoch_1.json", json.dumps(one))
    return path


def test_an_archive_gives_the_same_as_a_document(tmp_path: Path) -> None:
    packed = [p["steps"] for p in payloads(archive(tmp_path / "log.eval", sample(1), sample(2)))]
    whole = [p["steps"] for p in payloads(document(tmp_path / "log.json", log(sample(1), sample(2))))]
    keys = ("action", "observation", "state_sha256", "finish_reason")
    assert [[{k: s[k] for k in keys} for s in steps] for steps in packed] == [
        [{k: s[k] for k in keys} for s in steps] for steps in whole
    ]


def test_an_archive_compressed_with_zstandard(tmp_path: Path) -> None:
    path = archive(tmp_path / "log.eval", sample(1))
    raw, name = json.dumps(sample(1)).encode(), "samples/1_epoch_1.json"
    squeezed = bytes(pa.compress(raw, codec="zstd", asbytes=True))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("header.json", json.dumps({"version": 2, "eval": EVAL, "plan": {}}))
        file.writestr(name, squeezed)
    data = path.read_bytes()
    at, central = data.index(name.encode()) - 30, data.rindex(name.encode()) - 46
    marked = bytearray(data)
    marked[at + 8 : at + 10] = marked[central + 10 : central + 12] = (93).to_bytes(2, "little")
    path.write_bytes(bytes(marked))
    (one,), drops, _ = read(path)
    assert len(one.turns) == 2 and not drops


def test_a_damaged_sample_is_dropped_and_the_others_kept(tmp_path: Path) -> None:
    path = archive(tmp_path / "log.eval", sample(1), sample(2))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("samples/3_epoch_1.json", '{"id": 3, "mess')
    found, drops, _ = read(path)
    assert len(found) == 2 and [(drop.reason, drop.line) for drop in drops] == [("damaged_record", 3)]


@needs("real")
def test_real_files() -> None:
    found, drops, _ = read(REAL / "trajectories" / "inspect")
    assert len(found) == 22 and not drops and all(one.reward is not None for one in found)
