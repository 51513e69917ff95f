"""export hub: folders that `datasets` and `peft` open, without this machine's paths, sent only where asked."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from datasets import load_dataset
from peft import PeftModel
from support.command_line import call_process
from support.hub import OID, Hub, hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import export, train
from stages.errors import InfrastructureError, UsageError
from stages.formats.hub import dataset_card
from stages.runs import runner, store
from stages.runs.kinds import PAIR, ROLLOUT
from stages.runs.run import Manifest, Run, RunWriter, write_manifest
from stages.runs.stage import assign_inputs

TOKEN = "hf_" + "n0tarealtoken" * 2


def exported(run: Run, root: Path, **more: Any) -> Run:
    slot = "checkpoint" if run.manifest.stage == "train" else "rollouts"
    config = export.Config(format="hub", **more)
    return Run(runner.execute("export", {slot: run}, config, root=root / "artifacts").path)


def trained(root: Path, model: str, **more: Any) -> Run:
    optimisation = {"steps": 1, "prompts_per_step": 2, "generations": 2}
    policy = {"model": model, "max_tokens": 10, "dtype": "auto"}
    env = {"name": "support.environments:GuessEnv"}
    config = train.Config(env=env, policy=policy, tasks=4, arm="A", optimisation=optimisation, **more)
    return Run(runner.execute("train", {}, config, root=root).path)


def matter(folder: Path) -> dict[str, Any]:
    """The front matter of a card."""
    _, front, body = (folder / "README.md").read_text().split("---\n", 2)
    assert body.startswith("\n# ") and "# license:" in front
    return yaml.safe_load(front)


def assert_nameless(folder: Path, *places: Path) -> None:
    for path in folder.rglob("*"):
        text = path.read_bytes() if path.suffix in (".md", ".json", ".txt", ".jsonl") else b""
        assert not [place for place in places if str(place).encode() in text], path


def test_a_dataset_folder_is_opened_by_datasets(tmp_path: Path, tiny: Path, collected: Callable[..., Run]) -> None:
    run = collected()
    folder = exported(run, tmp_path).path / "hub"
    front, cache = matter(folder), str(tmp_path / "cache")
    assert {one["config_name"] for one in front["configs"]} == {"tasks", "rollouts", "steps"}
    assert "license" not in front and [o["config_name"] for o in front["configs"] if o.get("default")] == ["rollouts"]
    rows = load_dataset(str(folder), split="train", cache_dir=cache)
    assert [row["rollout_id"] for row in rows] == [row["rollout_id"] for row in run.rows(ROLLOUT)]
    steps = load_dataset(str(folder), "steps", split="train", cache_dir=cache)
    assert len(steps) == run.manifest.outputs["steps"]["rows"] > 0
    told = orjson.loads((folder / "composer" / "run.json").read_bytes())
    assert told["fingerprint"] == run.manifest.fingerprint and told["stage"] == "collect"
    assert_nameless(folder, tmp_path, tiny)


def test_a_run_of_pairs_is_a_dataset_and_nothing_for_other_formats(tmp_path: Path) -> None:
    about = {"composer": "1", "stage": "extract-pairs", "stage_version": 1, "fingerprint": "f", "status": "complete"}
    record, folder = Manifest(**about), tmp_path / "pairs"
    folder.mkdir()
    RunWriter(folder, record, cache=tmp_path).table(PAIR, [])
    write_manifest(folder, record)
    given = assign_inputs(export.STAGE, [Run(folder)])
    assert list(given) == ["pairs"]
    done = runner.execute("export", given, export.Config(format="hub"), root=tmp_path / "artifacts")
    assert matter(done.path / "hub")["configs"][0]["config_name"] == "pairs"
    with pytest.raises(UsageError, match="trl writes rollouts"):
        runner.execute("export", given, export.Config(format="trl"), root=tmp_path / "artifacts")


def test_equal_runs_are_equal_folders(tmp_path: Path, collected: Callable[..., Run]) -> None:
    run = collected()
    one, other = (exported(run, tmp_path / name).path / "hub" for name in ("a", "b"))
    assert store.folder_sha256(one) == store.folder_sha256(other)


@pytest.mark.slow
def test_a_model_folder_is_opened_by_peft_and_transformers(tmp_path: Path, tiny: Path) -> None:
    folder = exported(trained(tmp_path, str(tiny), adapter={"rank": 4, "alpha": 8.0}), tmp_path).path / "hub"
    front = matter(folder)
    assert front["library_name"] == "peft" and "base_model" not in front and "license" not in front
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
    assert_nameless(folder, tmp_path, tiny)

    whole = exported(trained(tmp_path, str(tiny), adapter={"rank": 0}), tmp_path).path / "hub"
    assert matter(whole)["library_name"] == "transformers"
    AutoModelForCausalLM.from_pretrained(whole)
    AutoTokenizer.from_pretrained(whole)
    assert_nameless(whole, tmp_path, tiny)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub(TOKEN) as running:
        yield running


def sent(run: Run, root: Path, server: Hub, *settings: str) -> Run:
    """An export in a process of its own, whose large files go by LFS, which the fake speaks."""
    words = [str(run.path), *(word for setting in settings for word in ("--set", setting))]
    words += ["--set", f"endpoint={server.endpoint}"]
    done = call_process(root / "artifacts", "export", "hub", *words, HF_HUB_DISABLE_XET="1", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    return Run((root / "artifacts" / "export" / "latest").resolve())


def test_a_named_repository_holds_the_folder_afterwards(
    tmp_path: Path, collected: Callable[..., Run], server: Hub
) -> None:
    run = sent(collected(), tmp_path, server, "repo=someone/rollouts")
    written = {str(p.relative_to(run.path / "hub")): p.read_bytes() for p in (run.path / "hub").rglob("*.*")}
    assert server.files == written and server.stored
    assert server.created == [
        {"name": "rollouts", "organization": "someone", "type": "dataset", "visibility": "private"}
    ]
    assert run.manifest.summary["repo"] == "someone/rollouts" and run.manifest.summary["oid"] == OID
    assert server.asked[-1] == "/api/datasets/someone/rollouts/commit/main"
    for path in run.path.rglob("*.*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()


def test_a_model_goes_to_a_model_repository_that_may_be_there(tmp_path: Path, tiny: Path, server: Hub) -> None:
    run = trained(tmp_path, str(tiny), adapter={"rank": 4, "alpha": 8.0})
    for name in ("a", "b"):
        sent(run, tmp_path / name, server, "repo=someone/model", "private=false")
    assert len(server.created) == 2 and "adapter_model.safetensors" in server.files
    assert server.created[0].get("type", "model") == "model" and server.created[0]["visibility"] == "public"


def test_without_a_repository_nothing_is_sent(tmp_path: Path, collected: Callable[..., Run], server: Hub) -> None:
    exported(collected(), tmp_path, endpoint=server.endpoint)
    assert server.asked == []


def test_a_refused_token_and_a_failing_hub_are_sentences_without_the_token(
    tmp_path: Path, collected: Callable[..., Run], server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = collected()
    server.status = 400
    with pytest.raises(InfrastructureError, match="answered 400 for someone/x") as failed:
        exported(run, tmp_path, repo="someone/x", endpoint=server.endpoint)
    server.status = 200
    monkeypatch.setenv("HF_TOKEN", other := TOKEN[::-1])
    with pytest.raises(UsageError, match="refuses the token for someone/y") as refused:
        exported(run, tmp_path, repo="someone/y", endpoint=server.endpoint)
    assert TOKEN not in str(failed.value) and other not in str(refused.value)
    with pytest.raises(UsageError, match="is no name for a repository"):
        exported(run, tmp_path, repo="a/b/c", endpoint=server.endpoint)


def test_what_cannot_be_sent_is_said_before_anything_is_written(
    tmp_path: Path, collected: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = collected()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match="holds the hub's token, is not set"):
        exported(run, tmp_path, repo="someone/x")
    with pytest.raises(UsageError, match="holds the hub's token"):
        export.Config(format="hub", repo="someone/x").check(Path())
    with pytest.raises(UsageError, match="goes with the format hub, not trl"):
        export.Config(format="trl", repo="someone/x").check(Path())
    given = {"rollouts": run, "pairs": collected(samples=1)}
    with pytest.raises(UsageError, match="publishes one run, and 2 were given"):
        runner.execute("export", given, export.Config(format="hub"), root=tmp_path)
    assert not list((tmp_path / "artifacts").rglob("README.md"))


def test_a_value_cannot_break_out_of_a_card() -> None:
    told = {
        "stage": "collect",
        "outcome": {"summary": {"a": "x|y\n# z <script>"}},
        "counts": {"n": 1},
        "config": {"b": "```\n# z"},
        "composer": "1",
        "fingerprint": "f",
    }
    card = dataset_card(told, {"tasks": {"kind": "task/1", "rows": 1}})
    headings = [line for line in io.StringIO(card) if line.startswith("# ") and "license" not in line]
    assert headings == ["# Records of `composer collect`\n"] and "<script>" not in card and "x\\|y" in card
