"""export: round trips through every format, what is lost, models, folders for the hub, and who can read them."""

import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NotRequired

import orjson
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from datasets import load_dataset
from needs import REAL, needs, where
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ConfigDict, TypeAdapter, with_config
from support.command_line import call_process
from support.hub import OID, Hub, hub
from support.models import tiny_tokenizer
from support.refusals import refused
from support.trainings import LORA, trained
from support.transcripts import (
    INSTANCE,
    PATCH,
    assistant,
    call,
    document,
    imported,
    jsonl,
    prediction,
    submitted,
    system,
    tool,
    user,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typing_extensions import TypedDict

from composer_stages import collect, export
from composer_stages.envs.bash import elide
from composer_stages.errors import BadInput, ComposerError, InfrastructureError, UsageError
from composer_stages.formats import FORMATS, writer
from composer_stages.formats.hub import dataset_card
from composer_stages.messages import MessageParts, ToolCall, number_calls, read, write
from composer_stages.policy import adapters
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import runner, store
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.kinds import ORIGIN, ROLLOUT, STEP, Row
from composer_stages.runs.run import Manifest, Run, RunWriter

OF_STEPS = ("step", "num_steps", "new_messages_json", "num_messages", "state_sha256", "action")
SAID = (*OF_STEPS, "observation", "reward", "done")
TOKENS = ("prompt_len", "prompt_delta_token_ids", "prefix_ok", "completion_token_ids", "logprobs", "capture_level")
CALLED = ("finish_reason", "truncated", "prompt_tokens", "completion_tokens", "cost_usd", "model", "sampling_json")
WHO = ("rollout_id", "task_id", "env", "family", "split", "group_id", "reward", "model", "num_steps")
ONE_STEP = {"optimisation": {"steps": 1, "generations": 2}, "policy": {"max_tokens": 10}}
"""A training of one step."""


Collected = Callable[..., Run]


def exported(root: Path, run: Run, wanted: str, **more: Any) -> Run:
    slot = "checkpoint" if run.manifest.stage == "train" else "rollouts"
    config = export.Config(format=wanted, **more)
    return Run(runner.execute("export", {slot: run}, config, root=root).path)


def of_steps(run: Run, *columns: str) -> list[list[Any]]:
    return [[row[name] for name in columns] for row in run.rows(STEP)]


def who(run: Run, *columns: str) -> list[list[Any]]:
    return [[row[name] for name in columns or WHO] for row in run.rows(ROLLOUT)]


def talk(folder: Path, *, tokens: bool = True) -> Path:
    """Rollouts of two models on one task: calls, one of them malformed, thoughts, a limit, a failure, no score."""
    calls = [call("f", '{"a":  1}', "x"), call("g", "not json", "y")]
    said = [
        system("Help."),
        user("q"),
        assistant("", reasoning_content="hm", tool_calls=calls),
        *(tool("one", tool_call_id="x"), tool("two", tool_call_id="y")),
        assistant("Done."),
    ]
    ids = [([1], 0), ([2, 3], 0), ([4, 5, 6], 2), ([7], 0), ([8], 0), ([9, 10], 1)]
    nodes = []
    for index, (one, (many, sampled)) in enumerate(zip(said, ids, strict=True)):
        mask = [False] * (len(many) - sampled) + [True] * sampled
        own = {"token_ids": many, "mask": mask, "logprobs": [-0.25] * sampled} if tokens else {}
        parent = {"parent": index - 1} if index else {}
        nodes.append({**parent, "message": one, "sampled": one["role"] == "assistant", **own})
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "cost": 0.5}
    task = {"type": "T", "key": "k", "data": {"prompt": "q", "answer": "42"}}
    tools = [{"name": "f", "description": "", "parameters": {"type": "object"}}]

    def trace(number: int, model: str, **more: Any) -> Row:
        called = {"model": model, "usage": usage, "sampling": {"temperature": 1.0}}
        calls = [{**called, "node": 2, "finish_reason": "tool_calls"}, {**called, "node": 5, "finish_reason": "length"}]
        one = {"id": f"t{number}", "task": task, "calls": calls, "nodes": nodes, "ok": True, "is_completed": True}
        one |= {"agent": {"config": {"model": model}}, "stop_condition": "done", "tools": tools}
        one |= {"rewards": {"r": {"score": 0.5}}, **more}
        return {"id": f"e{number}", "env": {"id": "e"}, "task": task, "traces": [one]}

    broken = {"nodes": [], "calls": [], "ok": False, "errors": [{"type": "E", "message": "died"}], "rewards": {}}
    ends = ({"rewards": {"r": {"score": 1.0}}}, {"stop_condition": "max_steps"}, {"rewards": {"r": None}}, broken)
    traces = [trace(number, "lab/m", **end) for number, end in enumerate(ends, 1)]
    return jsonl(folder / "traces.jsonl", *traces, trace(5, "other"))


@pytest.fixture
def talked(artifacts: Path) -> Run:
    """The rollouts of `talk`, imported."""
    return imported(artifacts, talk(artifacts / "in"))


# Round trips


def test_verifiers_round_trip_keeps_all_but_declared_losses(artifacts: Path, talked: Run) -> None:
    written = exported(artifacts, talked, "verifiers")
    after = imported(artifacts, written.path / "traces.jsonl")
    columns = (*SAID, *TOKENS, *CALLED)
    assert of_steps(after, *columns) == of_steps(talked, *columns) and len(of_steps(after, "step")) == 8
    columns = (*WHO, "terminated_by", "error_type")
    assert who(after, *columns) == who(talked, *columns)
    declared, again = ([json.loads(o["tools_json"]) for o in run.rows(ORIGIN)] for run in (talked, after))
    assert again == declared
    assert written.manifest.summary["lost"] and written.manifest.counts == {"rollouts": 5, "files": 1}


def test_trl_round_trip_keeps_messages_and_scores(artifacts: Path, talked: Run) -> None:
    written = exported(artifacts, talked, "trl")
    after = imported(artifacts, written.path / "completions")
    assert of_steps(after, *SAID) == of_steps(talked, *SAID)
    assert who(after) == [row for row in who(talked) if row[-1]] and written.manifest.counts["dropped_no_steps"] == 1
    assert {row["capture_level"] for row in after.rows(STEP)} == {"text"}  # declared as lost
    table = pq.read_table(written.path / "completions" / "completions_00000.parquet")
    function = table.column("completion")[0].as_py()[0]["tool_calls"][0]["function"]
    assert function == {"name": "f", "arguments": '{"a":  1}'}


def test_openenv_round_trip_keeps_rollouts_and_tokens(artifacts: Path, talked: Run) -> None:
    written = exported(artifacts, talked, "openenv")
    acted = [row for row in who(talked) if row[-1]]
    plain = imported(artifacts, written.path / "results.jsonl")
    assert of_steps(plain, *SAID) == of_steps(talked, *SAID) and who(plain) == acted
    rich = imported(artifacts, written.path / "captured_traces.jsonl")
    same = (*OF_STEPS, "reward", "done", *TOKENS, "finish_reason", "truncated", "model", "sampling_json")
    assert of_steps(rich, *same) == of_steps(talked, *same) and who(rich) == acted
    assert all(row["observation"] == "" for row in rich.rows(STEP) if row["done"])
    assert set(written.manifest.outputs) == {"results.jsonl", "captured_traces.jsonl"}
    assert who(imported(artifacts, written.path)) == acted  # the richer one of the two records is read first
    first = json.loads((written.path / "results.jsonl").read_text().splitlines()[0])["tool_trace"]
    assert [one["result"]["data"] for one in first] == ["one", "two"] and first[0]["arguments"] == {"a": 1}


def test_rollouts_without_tokens_have_no_training_trace(tmp_path: Path) -> None:
    written = exported(tmp_path, imported(tmp_path, talk(tmp_path / "in", tokens=False)), "openenv")
    assert list(written.manifest.outputs) == ["results.jsonl"]
    assert written.manifest.counts["dropped_no_tokens_for_a_training_trace"] == 4


def submissions(folder: Path, *handed_in: tuple[str, str]) -> Path:
    """A file for each model and patch, as mini-swe-agent writes them."""
    for number, (model, patch) in enumerate(handed_in):
        submitted(folder, str(number), patch, model)
    return folder


def test_predictions_round_trip_by_model_and_sample(tmp_path: Path) -> None:
    folder = submissions(tmp_path / "in", ("a/m", PATCH), ("a/m", "other"))
    for number in range(2):
        document(folder / f"{number}.report.json", {"patch_exists": True, "resolved": number == 1})
    before = imported(tmp_path, folder)
    written = exported(tmp_path, before, "swebench-preds")
    files = {"a-m/all_preds.jsonl", "a-m/report.json", "a-m.2/all_preds.jsonl", "a-m.2/report.json"}
    assert set(written.manifest.outputs) == files
    assert json.loads((written.path / "a-m" / "all_preds.jsonl").read_text()) == prediction(INSTANCE, PATCH, "a/m")
    after = imported(tmp_path, written.path)
    one, other = (
        ({o["submission"] for o in run.rows(ORIGIN)}, sorted(who(run, "task_id", "model", "hidden_pass")))
        for run in (before, after)
    )
    assert one == other


def test_similar_model_names_get_separate_files(tmp_path: Path) -> None:
    """`a/m` and `a m` are one name for a folder, `A/M` where case is ignored; `a/m.2` is the second sample of `a/m`."""
    models = [(name, f"patch {i}") for i, name in enumerate(("a/m", "a m", "A/M", "a/m", "a/m.2", "../m"))]
    before = imported(tmp_path, submissions(tmp_path / "in", *models))
    written = exported(tmp_path, before, "swebench-preds")
    files = sorted(path.relative_to(written.path) for path in written.path.rglob("all_preds.jsonl"))
    assert len(files) == len(models) == len({str(path).casefold() for path in files}) == len(written.manifest.outputs)
    predictions = [json.loads(line) for path in files for line in (written.path / path).read_text().splitlines()]
    assert sorted((one["model_name_or_path"], one["model_patch"]) for one in predictions) == sorted(models)
    archives = exported(tmp_path, before, "inspect").manifest.outputs
    assert sum(out["rows"] for out in archives.values()) == len(models) and len(archives) == 5


def test_no_file_of_an_export_is_written_twice(tmp_path: Path) -> None:
    record = Manifest(composer="", stage="export", stage_version=1, fingerprint="")
    out = RunWriter(tmp_path, record, cache=tmp_path)
    out.write_export("M/a.jsonl", lambda file: file.write(b"first"))
    with pytest.raises(ComposerError, match="m/a"):
        out.write_export("m/a.jsonl", lambda file: file.write(b"second"))
    assert (tmp_path / "M" / "a.jsonl").read_bytes() == b"first"


def test_rollouts_without_submission_are_no_predictions(tmp_path: Path, talked: Run) -> None:
    code, reasons = "nothing-to-export", ["5 no_submission"]
    refused(lambda: exported(tmp_path, talked, "swebench-preds"), BadInput, code=code, reasons=reasons)
    long = imported(tmp_path, submissions(tmp_path / "in", ("a/m", elide(PATCH * 9, len(PATCH))[0])))
    reasons = ["1 submission_too_long"]
    refused(lambda: exported(tmp_path, long, "swebench-preds"), BadInput, code=code, reasons=reasons)


@pytest.mark.parametrize("wanted", ["trl", "verifiers", "inspect"])
def test_collected_rollouts_round_trip(artifacts: Path, collected: Collected, wanted: str) -> None:
    before = collected()
    after = imported(artifacts, exported(artifacts, before, wanted).path)
    same = ("step", "new_messages_json", "state_sha256", "action", "reward", "done")
    same += TOKENS if wanted == "verifiers" else ("finish_reason",) if wanted == "inspect" else ()
    assert of_steps(after, *same) == of_steps(before, *same)
    if wanted == "verifiers":
        assert who(after, *WHO[:2]) == who(before, *WHO[:2])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trajectories of six other programs, imported once."""
    names = ("wiki-search", "nemo-gym", "openhands", "swe-agent", "inspect", "mini-swe-agent")
    return imported(tmp_path_factory.mktemp("recorded"), *(REAL / "trajectories" / name for name in names))


@needs("real")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl", "openenv", "verifiers"])
def test_real_rollouts_round_trip(tmp_path: Path, recorded: Run, name: str) -> None:
    after = imported(tmp_path, exported(tmp_path, recorded, name).path)
    kept = {row["rollout_id"] for row in after.rows(ROLLOUT)}
    same = ["rollout_id", "step", "new_messages_json", "action", "observation", "done"]
    if name != "verifiers":  # which declares tools in a form of its own, and a state is one of its tools, too
        same.append("state_sha256")
    expected = sorted(row for row in of_steps(recorded, *same) if row[0] in kept)
    assert sorted(of_steps(after, *same)) == expected and len(kept) >= 560


def test_calls_are_numbered_and_results_follow_them() -> None:
    two = write(MessageParts("", (ToolCall("f", "{}"), ToolCall("g", "{}"))))
    found = number_calls([assistant(two), *map(tool, "xyz")], iter(range(9)))
    assert found[0]["tool_calls"] == [call("f", "{}", "call_0"), call("g", "{}", "call_1")]
    assert [m["tool_call_id"] for m in found[1:]] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize("name", export.TARGETS)
def test_every_target_of_the_table_can_be_named(name: str) -> None:
    assert export.Config(format=name).format == name
    assert name not in FORMATS or writer(name).lost


@pytest.mark.parametrize("wanted", ["trl", "openenv", "verifiers"])
def test_hidden_test_log_is_not_exported(artifacts: Path, wanted: str) -> None:
    config = collect.Config(env={"name": "kata"}, policy={"model": "noop"}, tasks=1)
    rollouts = Run(runner.execute("collect", {}, config, root=artifacts).path)
    assert all(row["test_log"].endswith(" of 8 hidden cases pass") for row in rollouts.rows(ROLLOUT))
    assert "hidden cases" not in json.dumps(rollouts.rows(STEP))
    files = [path for path in exported(artifacts, rollouts, wanted).path.rglob("*") if path.is_file()]
    written = [str(pq.read_table(p).to_pylist()) if p.suffix == ".parquet" else str(p.read_bytes()) for p in files]
    assert any("solution.py" in text for text in written) and not any("hidden cases" in text for text in written)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_experts_are_merged_and_the_tokenizer_is_one_of_transformers_4_too(tmp_path: Path, family: str) -> None:
    """The exported model has peft's logits of the same adapter."""
    tokenizer, sizes = tiny_tokenizer(), {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer)}
    sizes |= {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, initializer_range=0.3))
    for one in (base, tokenizer):
        one.save_pretrained(tmp_path / "base")
    start = PolicyConfig(model=str(tmp_path / "base"))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    adapters.save_adapter(adapted, adapters.describe_base(start, base), tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    settings = export.Config(format="model", policy={"model": str(tmp_path / "adapter")})
    folder = runner.execute("export", {}, settings, root=tmp_path).path / "model"
    ids = torch.tensor([[5, 9, 30, 77, 12]])
    with torch.no_grad():
        merged, apart = (model(ids).logits for model in (AutoModelForCausalLM.from_pretrained(folder).eval(), adapted))
    torch.testing.assert_close(merged, apart, rtol=1e-4, atol=1e-4)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in written
    text = "<|im_start|>user\nfix"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_formats_refuse_other_sources(tmp_path: Path, artifacts: Path, tiny: Path) -> None:
    """`model` takes an adapter, formats of rollouts take no model; test_train.py merges one."""
    no_model = export.Config(format="model")
    refused(
        lambda: runner.execute("export", {}, no_model, root=tmp_path), UsageError, code="no-single-model", both=False
    )
    whole = trained(artifacts, tiny, **ONE_STEP)
    refused(lambda: exported(tmp_path, whole, "model"), BadInput, code="model-is-whole")
    both = {"code": "no-single-model", "both": True}
    refused(lambda: exported(tmp_path, whole, "model", policy="smollm2"), UsageError, **both)  # type: ignore[arg-type]
    with_model = export.Config(format="trl", policy={"model": "smollm2"})
    refused(with_model.reads_runs, UsageError, code="policy-without-model-format")
    refused(lambda: exported(tmp_path, whole, "trl"), UsageError, code="no-run-of-rollouts")


# inspect: archives of the documented shape, which our importer and inspect_ai itself read


def table(**fields: Any) -> Any:
    """A JSON object with exactly these keys, of exactly these types."""
    return with_config(ConfigDict(strict=True, extra="forbid"))(TypedDict("table", fields))


Call = table(id=str, function=str, type=Literal["function"], arguments=dict[str, Any], parse_error=NotRequired[str])
Part = table(type=Literal["reasoning", "text"], reasoning=NotRequired[str], text=NotRequired[str])
Role, Source = Literal["system", "user", "assistant", "tool"], NotRequired[Literal["input", "generate"]]
Calling = {"tool_calls": NotRequired[list[Call]], "tool_call_id": NotRequired[str]}
Said = table(id=str, role=Role, content=str | list[Part], source=Source, **Calling)
Usage = table(input_tokens=int, output_tokens=int, total_tokens=int, total_cost=float)
Choice = table(message=Said, stop_reason=Literal["stop", "max_tokens", "tool_calls", "content_filter", "unknown"])
Output = table(model=str, choices=list[Choice], usage=NotRequired[Usage])
Event = table(
    event=Literal["model"],
    uuid=str,
    timestamp=str,
    working_start=int,
    model=str,
    input=list[Said],
    input_refs=list[tuple[int, int]],
    tools=list[Any],
    tool_choice=Literal["auto"],
    config=dict[str, float],
    output=Output,
)
Sample = table(
    id=str,
    epoch=int,
    input=str | list[Said],
    target=str,
    messages=list[Said],
    output=Output,
    scores=dict[str, table(value=float | bool, answer=NotRequired[str])],
    metadata=dict[str, dict[str, Any]],
    events=list[Event],
    events_data=table(messages=list[Said], calls=list[Any]),
    model_usage=dict[str, Usage],
    uuid=str,
    error=NotRequired[table(message=str, traceback=str, traceback_ansi=str)],
    limit=NotRequired[table(type=Literal["turn", "context", "cost"], limit=float)],
)


@pytest.fixture
def archives(artifacts: Path, talked: Run) -> list[Path]:
    """The rollouts of `talk` for inspect, a file a model."""
    return sorted(exported(artifacts, talked, "inspect").path.glob("*.eval"))


def samples(path: Path) -> list[Row]:
    with zipfile.ZipFile(path) as archive:
        return [json.loads(archive.read(name)) for name in archive.namelist() if name.startswith("samples/")]


def test_inspect_samples_match_the_schema(archives: list[Path]) -> None:
    assert [path.name for path in archives] == ["e_lab-m.eval", "e_other.eval"]
    for path in archives:
        for sample in samples(path):
            TypeAdapter(Sample).validate_json(json.dumps(sample))
    with zipfile.ZipFile(archives[0]) as archive:
        header, summaries = (json.loads(archive.read(name)) for name in ("header.json", "summaries.json"))
        assert {name for name in archive.namelist() if "/" not in name} == {"header.json", "summaries.json"}
    assert [(one["id"], one["epoch"]) for one in summaries] == [("e/k", n) for n in (1, 2, 3, 4)]
    mean = {score["name"]: score["metrics"]["mean"]["value"] for score in header["results"]["scores"]}
    assert mean == {"reward": 0.75} and header["results"]["completed_samples"] == 3
    assert (header["eval"]["task"], header["eval"]["model"], header["status"]) == ("e", "lab/m", "success")


def test_messages_are_stored_once_and_events_refer_to_them(archives: list[Path]) -> None:
    first = samples(archives[0])[0]
    pool = first["events_data"]["messages"]
    assert [event["input_refs"] for event in first["events"]] == [[[0, 2]], [[0, 5]]]
    assert [event["output"]["choices"][0]["message"] for event in first["events"]] == [pool[2], pool[5]]
    good, bad = pool[2]["tool_calls"]
    assert good["arguments"] == {"a": 1} and bad["arguments"] == {} and "not json" in bad["parse_error"]


def test_inspect_round_trip_keeps_all_but_declared_losses(artifacts: Path, talked: Run) -> None:
    written = exported(artifacts, talked, "inspect")
    after = imported(artifacts, written.path)
    columns = (*(name for name in WHO if name != "group_id"), "hidden_pass", "terminated_by")
    assert who(after, *columns) == who(talked, *columns)
    columns = ("step", "observation", "done", "reward", "finish_reason", "prompt_tokens", "completion_tokens")
    columns += ("cost_usd", "num_messages")
    assert of_steps(after, *columns) == of_steps(talked, *columns)
    for now, then in zip(after.rows(STEP), talked.rows(STEP), strict=True):
        ours, theirs = read(now["action"]), read(then["action"])
        assert (ours.content, ours.reasoning) == (theirs.content, theirs.reasoning)
        assert [call.name for call in ours.calls] == [call.name for call in theirs.calls]
    assert [o["submission"] for o in after.rows(ORIGIN)] == [o["submission"] for o in talked.rows(ORIGIN)]
    failed = next(row for row in after.rows(ROLLOUT) if row["error_type"])
    assert (failed["error_type"], failed["error"]) == ("E", "died") and written.manifest.summary["lost"]


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
def test_inspect_ai_itself_reads_it(archives: list[Path]) -> None:
    words = [where("inspect"), "-W", "error::UserWarning", "-c", READER, str(archives[0].parent)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    names = ("task", "model", "status", "mean")
    assert [first[name] for name in names] == ["e", "lab/m", "success", {"reward": 0.75}]
    assert [len(log["samples"]) for log in (first, second)] == [4, 1]
    one, limited, unscored, failed = sorted(first["samples"], key=lambda sample: sample["epoch"])
    assert one["roles"] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert one["shown"] == [2, 5] and one["stops"] == ["tool_calls", "max_tokens"] and one["calls"] == ["f", "g"]
    assert one["text"][-2:] == ["two", "Done."] and one["scores"] == {"reward": 1.0}
    assert limited["limit"] == "turn" and unscored["scores"] == {}
    assert failed["error"] == "E: died" and failed["roles"] == []
    assert first["summaries"][0] == ["e/k", 1, 6]


# hub: folders that `datasets` and `peft` open, without this machine's paths, sent only where asked

TOKEN = "hf_" + "n0tarealtoken" * 2


def front_matter(folder: Path) -> dict[str, Any]:
    """Of the card, which leaves the licence to the user."""
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    assert body.startswith("\n# ") and "# license:" in front and "license" not in yaml.safe_load(front)
    return yaml.safe_load(front)


def assert_nameless(folder: Path, *places: Path) -> None:
    for path in folder.rglob("*"):
        text = path.read_bytes() if path.suffix in (".md", ".json", ".txt", ".jsonl") else b""
        assert not [place for place in places if str(place).encode() in text], path


def test_a_dataset_folder_is_opened_by_datasets(
    tmp_path: Path, tiny: Path, artifacts: Path, collected: Collected
) -> None:
    run = collected()
    folder = exported(artifacts, run, "hub").path / "hub"
    front, cache = front_matter(folder), str(tmp_path / "cache")
    assert {one["config_name"] for one in front["configs"]} == {"tasks", "rollouts", "steps"}
    assert [one["config_name"] for one in front["configs"] if one.get("default")] == ["rollouts"]
    rows = load_dataset(str(folder), split="train", cache_dir=cache)
    assert [row["rollout_id"] for row in rows] == [row["rollout_id"] for row in run.rows(ROLLOUT)]
    steps = load_dataset(str(folder), "steps", split="train", cache_dir=cache)
    assert len(steps) == run.manifest.outputs["steps"]["rows"] > 0
    record = orjson.loads((folder / "composer" / "run.json").read_bytes())
    assert record["fingerprint"] == run.manifest.fingerprint and record["stage"] == "collect"
    assert_nameless(folder, artifacts, run.path, tiny)
    again = exported(tmp_path, run, "hub").path / "hub"
    assert store.folder_sha256(folder) == store.folder_sha256(again)


def test_a_run_of_pairs_is_a_dataset_and_nothing_for_other_formats(tmp_path: Path, pairs: Run) -> None:
    given = assign_inputs(export.STAGE, [pairs])
    assert list(given) == ["pairs"]
    done = runner.execute("export", given, export.Config(format="hub"), root=tmp_path)
    assert "pairs" in [one["config_name"] for one in front_matter(done.path / "hub")["configs"]]
    trl = export.Config(format="trl")
    refused(lambda: runner.execute("export", given, trl, root=tmp_path), UsageError, code="no-run-of-rollouts")


@pytest.mark.slow
def test_a_model_folder_is_opened_by_peft_and_transformers(
    artifacts: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent.parent)
    relative = f"{tiny.parent.name}/{tiny.name}"  # as an id of the hub looks
    folder = exported(artifacts, trained(artifacts, relative, adapter=LORA, **ONE_STEP), "hub").path / "hub"
    assert front_matter(folder)["library_name"] == "peft" and "base_model" not in front_matter(folder)
    assert store.read_json(folder / "adapter_config.json")["base_model_name_or_path"] is None
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
    assert_nameless(folder, artifacts, tiny)

    whole = exported(artifacts, trained(artifacts, tiny, **ONE_STEP), "hub").path / "hub"
    assert front_matter(whole)["library_name"] == "transformers"
    AutoModelForCausalLM.from_pretrained(whole)
    AutoTokenizer.from_pretrained(whole)
    assert_nameless(whole, artifacts, tiny)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub(TOKEN) as running:
        yield running


def sent(run: Run, root: Path, server: Hub, *settings: str) -> Run:
    """An export in a process of its own, whose large files go by LFS, which the fake speaks."""
    words = [word for setting in (*settings, f"endpoint={server.endpoint}") for word in ("--set", setting)]
    done = call_process(root, "export", "hub", str(run.path), *words, HF_HUB_DISABLE_XET="1", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    return Run((root / "export" / "latest").resolve())


def test_export_pushes_the_folder_to_a_repository(tmp_path: Path, collected: Collected, server: Hub) -> None:
    run = sent(collected(), tmp_path, server, "repo=someone/rollouts")
    written = {str(p.relative_to(run.path / "hub")): p.read_bytes() for p in (run.path / "hub").rglob("*.*")}
    assert server.files == written and server.stored
    created = {"name": "rollouts", "organization": "someone", "type": "dataset", "visibility": "private"}
    assert server.created == [created]
    assert run.manifest.summary["repo"] == "someone/rollouts" and run.manifest.summary["oid"] == OID
    assert server.asked[-1] == "/api/datasets/someone/rollouts/commit/main"
    for path in run.path.rglob("*.*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()


def test_model_is_pushed_to_an_existing_model_repository(
    tmp_path: Path, artifacts: Path, tiny: Path, server: Hub
) -> None:
    server.existing.add("model")
    run = trained(artifacts, tiny, adapter=LORA, **ONE_STEP)
    sent(run, tmp_path, server, "repo=someone/model", "private=false")
    (created,) = server.created
    assert created.get("type", "model") == "model" and created["visibility"] == "public"
    assert "adapter_model.safetensors" in server.files


def test_without_a_repository_nothing_is_sent(tmp_path: Path, collected: Collected, server: Hub) -> None:
    exported(tmp_path, collected(), "hub", endpoint=server.endpoint)
    assert server.asked == []


def test_errors_of_the_hub_hide_the_token(
    tmp_path: Path, collected: Collected, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = collected()
    server.status = 400
    with pytest.raises(InfrastructureError, match=r"400.*someone/x") as failed:
        exported(tmp_path, run, "hub", repo="someone/x", endpoint=server.endpoint)
    server.status = 200
    monkeypatch.setenv("HF_TOKEN", other := TOKEN[::-1])
    with pytest.raises(UsageError, match="someone/y") as refused:
        exported(tmp_path, run, "hub", repo="someone/y", endpoint=server.endpoint)
    assert TOKEN not in str(failed.value) and other not in str(refused.value)
    with pytest.raises(UsageError, match="is not a name for a repository"):
        exported(tmp_path, run, "hub", repo="a/b/c", endpoint=server.endpoint)


def test_missing_token_is_refused_before_writing(
    tmp_path: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = collected()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for work in (
        lambda: exported(tmp_path, run, "hub", repo="someone/x"),
        export.Config(format="hub", repo="a/x").check,
    ):
        with pytest.raises(UsageError, match="HF_TOKEN"):
            work()
    with pytest.raises(UsageError, match="format hub, not trl"):
        export.Config(format="trl", repo="someone/x").check()
    given = {"rollouts": run, "pairs": collected(samples=1)}
    with pytest.raises(UsageError, match="2 were given"):
        runner.execute("export", given, export.Config(format="hub"), root=tmp_path)
    assert not list(tmp_path.rglob("README.md"))


def test_a_value_cannot_break_out_of_a_card() -> None:
    about = {"stage": "collect", "counts": {"n": 1}, "config": {"b": "```\n# z"}, "composer": "1", "fingerprint": "f"}
    about["outcome"] = {"summary": {"a": "x|y\n# z <script>"}}
    card = dataset_card(about, {"tasks": {"kind": "task/1", "rows": 1}})
    headings = [line for line in io.StringIO(card) if line.startswith("# ") and "license" not in line]
    assert headings == ["# Records of `composer collect`\n"] and "<script>" not in card and "x\\|y" in card
