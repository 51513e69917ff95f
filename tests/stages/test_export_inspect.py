"""export inspect: archives of the documented shape, read back by our importer and by inspect_ai itself."""

import json
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NotRequired

import pytest
from needs import needs, where
from pydantic import ConfigDict, TypeAdapter, with_config
from support.browser import browsing
from support.foreign import jsonl
from typing_extensions import TypedDict

from stages import export, import_traces
from stages.messages import read
from stages.runs import runner
from stages.runs.kinds import ORIGIN, ROLLOUT, STEP, Row
from stages.runs.run import Run

STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(STRICT)
class Call(TypedDict):
    id: str
    function: str
    type: Literal["function"]
    arguments: dict[str, Any]
    parse_error: NotRequired[str]


@with_config(STRICT)
class Part(TypedDict):
    type: Literal["reasoning", "text"]
    reasoning: NotRequired[str]
    text: NotRequired[str]


@with_config(STRICT)
class Said(TypedDict):
    id: str
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Part]
    source: NotRequired[Literal["input", "generate"]]
    tool_calls: NotRequired[list[Call]]
    tool_call_id: NotRequired[str]


@with_config(STRICT)
class Usage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    total_cost: float


@with_config(STRICT)
class Choice(TypedDict):
    message: Said
    stop_reason: Literal["stop", "max_tokens", "tool_calls", "content_filter", "unknown"]


@with_config(STRICT)
class Output(TypedDict):
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage]


@with_config(STRICT)
class Event(TypedDict):
    event: Literal["model"]
    uuid: str
    timestamp: str
    working_start: int
    model: str
    input: list[Said]
    input_refs: list[tuple[int, int]]
    tools: list[Any]
    tool_choice: Literal["auto"]
    config: dict[str, float]
    output: Output


@with_config(STRICT)
class Score(TypedDict):
    value: float | bool
    answer: NotRequired[str]


@with_config(STRICT)
class Pool(TypedDict):
    messages: list[Said]
    calls: list[Any]


@with_config(STRICT)
class Fault(TypedDict):
    message: str
    traceback: str
    traceback_ansi: str


@with_config(STRICT)
class Limit(TypedDict):
    type: Literal["turn", "context", "cost"]
    limit: float


@with_config(STRICT)
class Sample(TypedDict):
    id: str
    epoch: int
    input: str | list[Said]
    target: str
    messages: list[Said]
    output: Output
    scores: dict[str, Score]
    metadata: dict[str, dict[str, Any]]
    events: list[Event]
    events_data: Pool
    model_usage: dict[str, Usage]
    uuid: str
    error: NotRequired[Fault]
    limit: NotRequired[Limit]


SAMPLE = TypeAdapter(Sample)
"""Reads a sample; what does not fit is an error."""


WHO = ("rollout_id", "task_id", "env", "family", "split", "reward", "gt_pass", "model", "num_steps", "terminated_by")


def exported(rollouts: Run, root: Path) -> Run:
    config = export.Config(format="inspect")
    return Run(runner.execute("export", {"rollouts": rollouts}, config, root=root).path)


def imported(path: Path, root: Path) -> Run:
    return Run(runner.execute("import", {}, import_traces.Config(paths=[str(path)]), root=root).path)


def archives(run: Run) -> list[Path]:
    return sorted(run.path.glob("*.eval"))


def samples(path: Path) -> list[Row]:
    with zipfile.ZipFile(path) as archive:
        return [json.loads(archive.read(name)) for name in archive.namelist() if name.startswith("samples/")]


def talk(tmp_path: Path) -> Path:
    """Rollouts of two models on one task: calls, one of them malformed, thoughts, a limit, a failure, no score."""
    calls = [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}},
        {"id": "y", "type": "function", "function": {"name": "g", "arguments": "not json"}},
    ]
    said = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": i, "content": text} for i, text in (("x", "one"), ("y", "two"))),
        {"role": "assistant", "content": "Done."},
    ]
    nodes = [
        {**({"parent": i - 1} if i else {}), "message": one, "sampled": one["role"] == "assistant"}
        for i, one in enumerate(said)
    ]
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "cost": 0.5}
    task = {"type": "T", "key": "k", "data": {"prompt": "q", "answer": "42"}}

    def trace(number: int, model: str, **more: Any) -> Row:
        answered = [{"node": 2, "model": model, "finish_reason": "tool_calls", "usage": usage}]
        answered += [{"node": 5, "model": model, "finish_reason": "length", "usage": usage}]
        one = {"id": f"t{number}", "task": task, "calls": answered, "nodes": nodes, "ok": True, "is_completed": True}
        one |= {"agent": {"config": {"model": model}}, "stop_condition": "done", "rewards": {"r": {"score": 0.5}}}
        return {"id": f"e{number}", "env": {"id": "e"}, "task": task, "traces": [{**one, **more}]}

    broken = {"nodes": [], "calls": [], "ok": False, "errors": [{"type": "E", "message": "died"}], "rewards": {}}
    return jsonl(
        tmp_path / "in" / "traces.jsonl",
        trace(1, "lab/m", rewards={"r": {"score": 1.0}}),
        trace(2, "lab/m", stop_condition="max_steps"),
        trace(3, "lab/m", rewards={"r": None}),
        trace(4, "lab/m", **broken),
        trace(5, "other"),
    )


def test_every_sample_has_the_documented_shape(tmp_path: Path) -> None:
    written = exported(imported(talk(tmp_path), tmp_path), tmp_path)
    assert [path.name for path in archives(written)] == ["e_lab-m.eval", "e_other.eval"]
    for path in archives(written):
        for sample in samples(path):
            SAMPLE.validate_json(json.dumps(sample))
    with zipfile.ZipFile(archives(written)[0]) as archive:
        header, summaries = (json.loads(archive.read(name)) for name in ("header.json", "summaries.json"))
        assert {name for name in archive.namelist() if "/" not in name} == {"header.json", "summaries.json"}
    assert [(one["id"], one["epoch"]) for one in summaries] == [("e/k", n) for n in (1, 2, 3, 4)]
    mean = {score["name"]: score["metrics"]["mean"]["value"] for score in header["results"]["scores"]}
    assert mean == {"reward": 0.75} and header["results"]["completed_samples"] == 3
    assert (header["eval"]["task"], header["eval"]["model"], header["status"]) == ("e", "lab/m", "success")


def test_messages_are_stored_once_and_events_refer_to_them(tmp_path: Path) -> None:
    written = exported(imported(talk(tmp_path), tmp_path), tmp_path)
    first = samples(archives(written)[0])[0]
    pool = first["events_data"]["messages"]
    assert [event["input_refs"] for event in first["events"]] == [[[0, 2]], [[0, 5]]]
    assert [event["output"]["choices"][0]["message"] for event in first["events"]] == [pool[2], pool[5]]
    good, bad = pool[2]["tool_calls"]
    assert good["arguments"] == {"a": 1} and bad["arguments"] == {} and "not json" in bad["parse_error"]


def test_our_importer_reads_back_all_but_what_is_declared_lost(tmp_path: Path) -> None:
    before = imported(talk(tmp_path), tmp_path)
    written = exported(before, tmp_path)
    after = imported(written.path, tmp_path)
    assert [[row[n] for n in WHO] for row in after.rows(ROLLOUT)] == [[r[n] for n in WHO] for r in before.rows(ROLLOUT)]
    columns = ("step", "observation", "done", "reward", "finish_reason", "prompt_tokens", "completion_tokens")
    columns += ("cost_usd", "num_messages")
    assert [[r[n] for n in columns] for r in after.rows(STEP)] == [[r[n] for n in columns] for r in before.rows(STEP)]
    for now, then in zip(after.rows(STEP), before.rows(STEP), strict=True):
        ours, theirs = read(now["action"]), read(then["action"])
        assert (ours.content, ours.reasoning) == (theirs.content, theirs.reasoning)
        assert [call.name for call in ours.calls] == [call.name for call in theirs.calls]
    assert [o["submission"] for o in after.rows(ORIGIN)] == [o["submission"] for o in before.rows(ORIGIN)]
    failed = next(row for row in after.rows(ROLLOUT) if row["error_type"])
    assert (failed["error_type"], failed["error"]) == ("E", "died") and written.manifest.summary["lost"]


def test_collected_rollouts_keep_every_word_and_equal_ones_give_equal_bytes(
    tmp_path: Path, collected: Callable[..., Run]
) -> None:
    before = collected()
    written = exported(before, tmp_path / "a")
    again = exported(before, tmp_path / "b")
    assert [path.read_bytes() for path in archives(written)] == [path.read_bytes() for path in archives(again)]
    after = imported(written.path, tmp_path)
    same = ("task_id", "step", "new_messages_json", "state_sha256", "action", "reward", "done", "finish_reason")
    assert [[r[n] for n in same] for r in after.rows(STEP)] == [[r[n] for n in same] for r in before.rows(STEP)]


READER = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
found = []
for info in sorted(list_eval_logs(sys.argv[1]), key=lambda info: info.name):
    log = read_eval_log(info.name)
    header = read_eval_log(info.name, header_only=True)
    told = [
        {
            "id": s.id, "epoch": s.epoch, "roles": [m.role for m in s.messages], "text": [m.text for m in s.messages],
            "scores": {name: score.value for name, score in (s.scores or {}).items()},
            "shown": [len(e.input) for e in s.events if e.event == "model"],
            "stops": [e.output.stop_reason for e in s.events if e.event == "model"],
            "error": s.error.message if s.error else None, "limit": s.limit.type if s.limit else None,
            "calls": [call.function for m in s.messages if m.role == "assistant" for call in m.tool_calls or []],
        }
        for s in log.samples
    ]
    summaries = [(s.id, s.epoch, s.message_count) for s in read_eval_log_sample_summaries(info.name)]
    mean = {s.name: s.metrics["mean"].value for s in header.results.scores}
    found.append({"task": info.task, "model": header.eval.model, "status": log.status, "mean": mean, "samples": told,
                  "summaries": summaries})
print(json.dumps(found))
"""


@needs("inspect")
def test_inspect_ai_itself_reads_it(tmp_path: Path) -> None:
    written = exported(imported(talk(tmp_path), tmp_path), tmp_path)
    done = subprocess.run(
        [where("inspect"), "-W", "error::UserWarning", "-c", READER, str(written.path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["task"], first["model"], first["status"], first["mean"]) == (
        "e",
        "lab/m",
        "success",
        {"reward": 0.75},
    )
    assert [len(log["samples"]) for log in (first, second)] == [4, 1]
    one, limited, unscored, failed = sorted(first["samples"], key=lambda sample: sample["epoch"])
    assert one["roles"] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert one["shown"] == [2, 5] and one["stops"] == ["tool_calls", "max_tokens"] and one["calls"] == ["f", "g"]
    assert one["text"][-2:] == ["two", "Done."] and one["scores"] == {"reward": 1.0}
    assert limited["limit"] == "turn" and unscored["scores"] == {}
    assert failed["error"] == "E: died" and failed["roles"] == []
    assert first["summaries"][0] == ["e/k", 1, 6]


@needs("inspect", "chromium")
@pytest.mark.slow
def test_its_own_viewer_shows_it(tmp_path: Path) -> None:
    written = exported(imported(talk(tmp_path), tmp_path), tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "inspect_ai", "view", "start", "--log-dir", str(written.path), "--port", str(port)]
    viewer = subprocess.Popen([where("inspect"), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert viewer.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        with browsing(tmp_path) as tab:
            tab.open(f"http://127.0.0.1:{port}/#/logs/e_lab-m.eval/samples/sample/e%2Fk/1/messages")
            shown = "document.body.innerText"
            tab.until(f"{shown}.includes('Done.') && {shown}.includes('hm') && {shown}.includes('two')")
            assert "lab/m" in tab.value(shown)
    finally:
        viewer.terminate()
        viewer.wait(30)
