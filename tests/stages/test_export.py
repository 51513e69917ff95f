"""export: round trips through every format, what is lost, and the peers' own validators where they are installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from needs import REAL, needs
from support.foreign import INSTANCE, PATCH, call, document, jsonl

from stages import collect, export, import_traces
from stages.errors import BadInput, ComposerError
from stages.formats import FORMATS, writer
from stages.runs import runner
from stages.runs.kinds import ORIGIN, ROLLOUT, STEP
from stages.runs.run import Manifest, Run, RunWriter

SAID = (
    "step",
    "num_steps",
    "new_messages_json",
    "num_messages",
    "state_sha256",
    "action",
    "observation",
    "reward",
    "done",
)
TOKENS = ("prompt_len", "prompt_delta_token_ids", "prefix_ok", "completion_token_ids", "logprobs", "capture_level")
CALLED = ("finish_reason", "truncated", "prompt_tokens", "completion_tokens", "cost_usd", "model", "sampling_json")
WHO = ("rollout_id", "task_id", "env", "family", "split", "group_id", "reward", "model", "num_steps")
Exporting = Callable[..., Run]


@pytest.fixture
def exported(tmp_path: Path) -> Exporting:
    def run(rollouts: Run, wanted: str) -> Run:
        config = export.Config(format=wanted)
        return Run(runner.execute("export", {"rollouts": rollouts}, config, root=tmp_path / "artifacts").path)

    return run


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., Run]:
    def run(*paths: Path) -> Run:
        config = import_traces.Config(paths=[str(path) for path in paths])
        return Run(runner.execute("import", {}, config, root=tmp_path / "artifacts").path)

    return run


def told(run: Run, columns: tuple[str, ...]) -> list[list[Any]]:
    return [[row[name] for name in columns] for row in run.rows(STEP)]


def who(run: Run, columns: tuple[str, ...] = WHO) -> list[list[Any]]:
    return [[row[name] for name in columns] for row in run.rows(ROLLOUT)]


def talk(tmp_path: Path, *, tokens: bool = True) -> Path:
    """Two traces with calls, thoughts, several observations and tokens; a failed rollout; one that nobody scored."""
    message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "x", "name": "f", "arguments": '{"a":  1}'}] * 2,
    }
    shown = [{"role": "tool", "tool_call_id": "x", "content": text} for text in ("one", "two")]
    messages = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "q"},
        message,
        *shown,
        {"role": "assistant", "content": "Done."},
    ]
    ids = [([1], 0), ([2, 3], 0), ([4, 5, 6], 2), ([7], 0), ([8], 0), ([9, 10], 1)]
    nodes = []
    for index, (one, (many, sampled)) in enumerate(zip(messages, ids, strict=True)):
        mask = [False] * (len(many) - sampled) + [True] * sampled
        own = {"token_ids": many, "mask": mask, "logprobs": [-0.25] * sampled} if tokens else {}
        nodes.append({"parent": index - 1, "message": one, "sampled": one["role"] == "assistant", **own})
    nodes[0].pop("parent")
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "cost": 0.5}
    calls = [{"node": 2, "model": "m", "finish_reason": "tool_calls", "usage": usage, "sampling": {"temperature": 1.0}}]
    calls += [{"node": 5, "model": "m", "finish_reason": "length", "usage": usage, "sampling": {"temperature": 1.0}}]
    task = {"type": "T", "key": "k", "data": {"prompt": "q"}}
    common = {"task": task, "calls": calls, "nodes": nodes, "ok": True, "is_completed": True, "stop_condition": "done"}
    tools = [{"name": "f", "description": "", "parameters": {"type": "object"}}]
    scored = {"id": "t1", **common, "tools": tools, "rewards": {"r": {"score": 0.5}}}
    unscored = {"id": "t2", **common, "rewards": {"r": None}}
    failed = {
        "id": "t3",
        "task": task,
        "nodes": [],
        "ok": False,
        "errors": [{"type": "E", "message": "died"}],
        "rewards": {},
    }
    return jsonl(
        tmp_path / "in" / "traces.jsonl",
        *({"id": t["id"], "env": {"id": "e"}, "task": task, "traces": [t]} for t in (scored, unscored, failed)),
    )


def test_verifiers_gives_back_everything_but_what_it_declares(
    tmp_path: Path, imported: Any, exported: Exporting
) -> None:
    before = imported(talk(tmp_path))
    written = exported(before, "verifiers")
    after = imported(written.path / "traces.jsonl")
    assert told(after, SAID + TOKENS + CALLED) == told(before, SAID + TOKENS + CALLED) and len(told(after, SAID)) == 4
    assert who(after) == who(before) and who(after, ("terminated_by", "error_type")) == who(
        before, ("terminated_by", "error_type")
    )
    assert [o["tools_json"] for o in after.rows(ORIGIN)] == [o["tools_json"] for o in before.rows(ORIGIN)]
    assert written.manifest.summary["lost"] and written.manifest.counts == {"rollouts": 3, "files": 1}


def test_trl_gives_back_what_was_said_and_scored(tmp_path: Path, imported: Any, exported: Exporting) -> None:
    before = imported(talk(tmp_path))
    written = exported(before, "trl")
    after = imported(written.path / "completions")
    assert told(after, SAID) == told(before, SAID)
    assert who(after) == [row for row in who(before) if row[-1]] and written.manifest.counts["dropped_no_steps"] == 1
    assert {row["capture_level"] for row in after.rows(STEP)} == {"text"}  # declared as lost
    table = pq.read_table(written.path / "completions" / "completions_00000.parquet")
    assert table.column("completion")[0].as_py()[0]["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": '{"a":  1}',
    }


def test_openenv_gives_back_episodes_and_captured_tokens(tmp_path: Path, imported: Any, exported: Exporting) -> None:
    before = imported(talk(tmp_path))
    written = exported(before, "openenv")
    acted = [row for row in who(before) if row[-1]]
    plain = imported(written.path / "results.jsonl")
    assert told(plain, SAID) == told(before, SAID) and who(plain) == acted
    rich = imported(written.path / "captured_traces.jsonl")
    same = (*SAID[:-3], "reward", "done", *TOKENS, "finish_reason", "truncated", "model", "sampling_json")
    kept = told(before, same)
    last = [row for row in rich.rows(STEP) if row["done"]]
    assert told(rich, same) == kept and who(rich) == acted and all(row["observation"] == "" for row in last)
    assert set(written.manifest.outputs) == {"results.jsonl", "captured_traces.jsonl"}
    assert who(imported(written.path)) == acted  # of the two records of an episode the richer one is read first
    entry = json.loads((written.path / "results.jsonl").read_text().splitlines()[0])
    assert [one["result"]["data"] for one in entry["tool_trace"]] == ["one", "two"] and entry["tool_trace"][0][
        "arguments"
    ] == {"a": 1}


def test_rollouts_without_tokens_have_no_training_trace(tmp_path: Path, imported: Any, exported: Exporting) -> None:
    written = exported(imported(talk(tmp_path, tokens=False)), "openenv")
    assert list(written.manifest.outputs) == ["results.jsonl"]
    assert written.manifest.counts["dropped_no_tokens_for_a_training_trace"] == 2


def test_predictions_come_back_with_their_verdicts_one_folder_a_model_and_sample(
    tmp_path: Path, imported: Any, exported: Exporting
) -> None:
    for number, patch in enumerate((PATCH, "other")):
        info = {"mini_version": "2", "submission": patch, "config": {"model": {"model_name": "a/m"}}}
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "```bash\nls\n```"}]
        document(tmp_path / "in" / f"{number}.traj.json", {"info": info, "messages": said, "instance_id": INSTANCE})
        document(tmp_path / "in" / f"{number}.report.json", {"patch_exists": True, "resolved": number == 1})
    before = imported(tmp_path / "in")
    written = exported(before, "swebench-preds")
    files = {"a-m/all_preds.jsonl", "a-m/report.json", "a-m.2/all_preds.jsonl", "a-m.2/report.json"}
    assert set(written.manifest.outputs) == files
    line = json.loads((written.path / "a-m" / "all_preds.jsonl").read_text())
    assert line == {"instance_id": INSTANCE, "model_name_or_path": "a/m", "model_patch": PATCH}
    after = imported(written.path)
    handed_in = [{(o["submission"]) for o in run.rows(ORIGIN)} for run in (before, after)]
    assert handed_in[0] == handed_in[1] and sorted(who(after, ("task_id", "model", "gt_pass"))) == sorted(
        who(before, ("task_id", "model", "gt_pass"))
    )


def test_models_whose_names_are_alike_get_files_of_their_own(
    tmp_path: Path, imported: Any, exported: Exporting
) -> None:
    """`a/m` and `a m` are one name for a folder, `A/M` where case is ignored; `a/m.2` is the second sample of `a/m`."""
    models = ["a/m", "a m", "A/M", "a/m", "a/m.2", "../m"]
    for number, model in enumerate(models):
        info = {"mini_version": "2", "submission": f"patch {number}", "config": {"model": {"model_name": model}}}
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"```bash\nls {number}\n```"}]
        document(tmp_path / "in" / f"{number}.traj.json", {"info": info, "messages": said, "instance_id": INSTANCE})
    before = imported(tmp_path / "in")
    written = exported(before, "swebench-preds")
    files = sorted(path.relative_to(written.path) for path in written.path.rglob("all_preds.jsonl"))
    assert len(files) == len(models) == len({str(path).casefold() for path in files}) == len(written.manifest.outputs)
    predictions = [json.loads(line) for path in files for line in (written.path / path).read_text().splitlines()]
    assert sorted((one["model_name_or_path"], one["model_patch"]) for one in predictions) == sorted(
        (model, f"patch {number}") for number, model in enumerate(models)
    )
    archives = exported(before, "inspect").manifest.outputs
    assert sum(out["rows"] for out in archives.values()) == len(models) and len(archives) == 5


def test_no_file_of_an_export_is_written_twice(tmp_path: Path) -> None:
    record = Manifest(composer="", stage="export", stage_version=1, fingerprint="")
    out = RunWriter(tmp_path, record, cache=tmp_path)
    out.write_export("M/a.jsonl", lambda file: file.write(b"first"))
    with pytest.raises(ComposerError, match="Two files of this export are called m/a"):
        out.write_export("m/a.jsonl", lambda file: file.write(b"second"))
    assert (tmp_path / "M" / "a.jsonl").read_bytes() == b"first"


def test_rollouts_that_handed_nothing_in_cannot_be_predictions(
    tmp_path: Path, imported: Any, exported: Exporting
) -> None:
    with pytest.raises(BadInput, match="3 no_submission"):
        exported(imported(talk(tmp_path)), "swebench-preds")


def test_collected_rollouts_export_with_their_tokens(
    tmp_path: Path, collected: Callable[..., Run], imported: Any, exported: Exporting
) -> None:
    before = collected()
    after = imported(exported(before, "verifiers").path / "traces.jsonl")
    same = ("step", "new_messages_json", "state_sha256", "action", "reward", "done", *TOKENS)
    assert told(after, same) == told(before, same)
    assert [row[:2] for row in who(after)] == [row[:2] for row in who(before)]
    assert told(imported(exported(before, "trl").path), same[:6]) == told(before, same[:6])


def test_an_export_is_an_artifact_that_notices_damage(tmp_path: Path, imported: Any, exported: Exporting) -> None:
    written = exported(imported(talk(tmp_path)), "trl")
    assert written.damage() is None
    (written.path / "completions" / "completions_00000.parquet").write_bytes(b"x")
    assert "completions_00000.parquet has 1 bytes" in str(written.damage())


@needs("real")
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["trl", "openenv", "verifiers"])
def test_real_rollouts_round_trip(imported: Any, exported: Exporting, wanted: str) -> None:
    names = ("wiki-search", "nemo-gym", "openhands", "swe-agent", "inspect", "mini-swe-agent")
    before = imported(*(REAL / "trajectories" / name for name in names))
    after = imported(exported(before, wanted).path)
    kept = {row["rollout_id"] for row in after.rows(ROLLOUT)}
    same = ("rollout_id", "step", "new_messages_json", "state_sha256", "action", "observation", "done")
    expected = sorted(row for row in told(before, same) if row[0] in kept)
    assert sorted(told(after, same)) == expected and len(kept) >= 560


def test_calls_are_numbered_and_results_follow_them() -> None:
    from stages.messages import Spoken, ToolCall, numbered, write

    two = write(Spoken("", (ToolCall("f", "{}"), ToolCall("g", "{}"))))
    messages = [{"role": "assistant", "content": two}, *({"role": "tool", "content": c} for c in "xyz")]
    found = numbered(messages, iter(range(9)))
    assert found[0]["tool_calls"] == [call("f", "{}", "call_0"), call("g", "{}", "call_1")]
    assert [m["tool_call_id"] for m in found[1:]] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize("name", export.TARGETS)
def test_every_target_of_the_table_can_be_named(name: str) -> None:
    assert export.Config(format=name).format == name
    assert name not in FORMATS or writer(name).lost


@pytest.mark.parametrize("wanted", ["trl", "openenv", "verifiers"])
def test_the_log_of_hidden_tests_is_in_the_table_of_rollouts_alone(
    tmp_path: Path, exported: Exporting, wanted: str
) -> None:
    config = collect.Config(env={"name": "kata"}, policy={"model": "noop"}, tasks=1)
    rollouts = Run(runner.execute("collect", {}, config, root=tmp_path / "artifacts").path)
    assert all(row["test_log"].endswith(" of 8 hidden cases pass") for row in rollouts.rows(ROLLOUT))
    assert "hidden cases" not in json.dumps(rollouts.rows(STEP))
    files = [path for path in exported(rollouts, wanted).path.rglob("*") if path.is_file()]
    written = [str(pq.read_table(p).to_pylist()) if p.suffix == ".parquet" else str(p.read_bytes()) for p in files]
    assert any("solution.py" in text for text in written) and not any("hidden cases" in text for text in written)
