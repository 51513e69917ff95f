"""LoRA: the base stays as it is, a checkpoint is an adapter that knows its base, and stages take it as a policy."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages import collect, evaluate, export, train
from stages.errors import BadInput, UsageError
from stages.policy import adapters
from stages.policy.base import PolicyConfig
from stages.policy.local import LocalPolicy, load_model
from stages.runs import runner, store
from stages.runs.kinds import CHECKPOINT, EVAL_ITEM, ROLLOUT
from stages.runs.run import Interrupted, Run
from stages.training.scoring import Tree, score, token_log_probs

ENV = "support.environments:GuessEnv"
SMALL = {"steps": 2, "prompts_per_step": 2, "generations": 4}
LORA = {"rank": 4, "alpha": 8.0}
TREE = Tree([5, 6, 7], ([8, 9, 10], [4, 5]))


def until_rested(folder: Path) -> None:
    """Wait until files that were just written count as unchanging."""
    newest = max(path.stat().st_ctime for path in folder.iterdir())
    time.sleep(max(0.0, newest + store.CTIME_MARGIN_S + 0.1 - time.time()))


def trained(root: Path, model: str, arm: str = "A", **more: Any) -> Run:
    settings = {"optimisation": SMALL, "adapter": LORA, **more}
    config = train.Config(
        env={"name": ENV}, policy={"model": model, "max_tokens": 20, "dtype": "auto"}, tasks=4, arm=arm, **settings
    )
    return Run(runner.execute("train", {}, config, root=root).path)


def opened(model: str, cache: Path, **more: Any) -> Any:
    return load_model(PolicyConfig(model=model), cache=cache, listener=lambda *a: None, **more)[0].eval()


@torch.no_grad()
def scores(model: Any) -> torch.Tensor:
    return token_log_probs(model, score(model, [TREE]))


def test_only_the_file_names_the_base_as_the_user_wrote_it(tmp_path: Path, tiny: Path) -> None:
    """Whenever a model is saved, peft looks for the config of the base that it names, on the hub if it is no folder."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2, target_modules=["q_proj"]))
    base = adapters.AdapterBase(model="world:student", weights="0", dtype="float32")
    adapters.save_adapter(model, base, tmp_path / "adapter")
    assert (
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == base.model
    )
    assert model.peft_config["default"].base_model_name_or_path == str(tiny)


def test_a_checkpoint_is_an_adapter_in_float32_with_its_base(tmp_path: Path, tiny: Path) -> None:
    run = trained(tmp_path, str(tiny))
    folder = run.folder(CHECKPOINT)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "composer_base.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names and not [name for name in names if name.endswith((".bin", ".pt"))]
    weights = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32} and not [n for n in weights if "head" in n]
    assert all(tensor.abs().sum() > 0 for name, tensor in weights.items() if "lora_B" in name), "nothing was learned"
    record = orjson.loads((folder / "composer_base.json").read_bytes())
    assert (record["model"], record["dtype"]) == (str(tiny), "float32")


def test_the_folder_of_a_model_is_hashed_once_in_a_training(tmp_path: Path, tiny: Path) -> None:
    """Settings, checkpoint and adapter's record all name it by its bytes, which may be many."""
    shutil.copytree(tiny, tmp_path / "model")
    until_rested(tmp_path / "model")
    read, listening = [0], [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and arguments[0] == str(tmp_path / "model" / "model.safetensors"):
            read[0] += 1

    sys.addaudithook(hook)
    trained(tmp_path, str(tmp_path / "model"), optimisation={**SMALL, "steps": 1})
    listening.clear()
    assert read[0] == 1


def test_an_adapter_can_be_left_beside_its_base_or_merged(tmp_path: Path, tiny: Path) -> None:
    run = trained(tmp_path, str(tiny), optimisation={**SMALL, "learning_rate": 1e-2}, adapter={**LORA, "dora": True})
    folder = str(run.folder(CHECKPOINT))
    beside, merged = scores(opened(folder, tmp_path, merged=False)), scores(opened(folder, tmp_path))
    start = scores(opened(str(tiny), tmp_path))
    assert (beside - start).abs().max() > 1e-3
    torch.testing.assert_close(beside, merged, atol=1e-5, rtol=1e-4)

    written = Run(runner.execute("export", {"checkpoint": run}, export.Config(format="merged"), root=tmp_path).path)
    plain = AutoModelForCausalLM.from_pretrained(written.path / "merged")
    torch.testing.assert_close(scores(plain.eval()), beside, atol=1e-5, rtol=1e-4)
    assert {name for name, _ in plain.named_parameters()} == {
        n for n, _ in opened(str(tiny), tmp_path).named_parameters()
    }
    assert written.manifest.counts["changed_weights"] > 0.9 * written.manifest.counts["adapted_weights"]


def test_only_an_adapter_can_be_merged(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match="Give its run"):
        runner.execute("export", {}, export.Config(format="merged"), root=tmp_path)
    whole = trained(tmp_path, str(tiny), adapter={"rank": 0})
    with pytest.raises(BadInput, match="whole model, not an adapter"):
        runner.execute("export", {"checkpoint": whole}, export.Config(format="merged"), root=tmp_path)
    with pytest.raises(UsageError, match="trl writes rollouts"):
        runner.execute("export", {"checkpoint": whole}, export.Config(format="trl"), root=tmp_path)


@pytest.mark.slow
def test_a_stopped_training_ends_in_the_same_adapter(tmp_path: Path, tiny: Path) -> None:
    config = train.Config(
        env={"name": ENV}, policy={"model": str(tiny), "max_tokens": 20}, tasks=4, optimisation=SMALL, adapter=LORA
    )

    def stop(what: str, done: int, of: int) -> None:
        if what == "training steps" and done == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        runner.execute("train", {}, config, root=tmp_path / "a", listener=stop)
    resumed = Run(runner.execute("train", {}, config, root=tmp_path / "a", resume=True).path)
    whole = Run(runner.execute("train", {}, config, root=tmp_path / "b").path)
    one, other = (run.folder(CHECKPOINT) / "adapter_model.safetensors" for run in (resumed, whole))
    assert one.read_bytes() == other.read_bytes()


def test_the_reference_is_the_base_with_the_adapter_off(tmp_path: Path, tiny: Path) -> None:
    """No second copy: GRPO's KL is zero while the adapter still is, and the trainer holds one model."""
    run = trained(tmp_path, str(tiny), optimisation={**SMALL, "beta": 0.5, "learning_rate": 1e-2})
    first, second = (orjson.loads(line) for line in (run.path / "metrics.jsonl").read_bytes().splitlines())
    assert first["kl"] == 0 and second["kl"] > 0
    assert "ref" not in {path.name for path in run.folder(CHECKPOINT).iterdir()}


def test_collect_and_evaluate_take_it_as_a_policy(tmp_path: Path, tiny: Path) -> None:
    arm = trained(tmp_path, str(tiny))
    folder = str(arm.folder(CHECKPOINT))
    rollouts = collect.Config(env={"name": ENV}, policy={"model": folder, "max_tokens": 16}, tasks=2, samples=2)
    assert len(Run(runner.execute("collect", {}, rollouts, root=tmp_path).path).rows(ROLLOUT)) == 4
    compare = evaluate.Config(env={"name": ENV, "split": "eval"}, tasks=2, baseline="start", treatment="A")
    items = Run(runner.execute("evaluate", {"arms": arm}, compare, root=tmp_path).path).rows(EVAL_ITEM)
    assert {item["arm"] for item in items} == {"A", "start"} and not [i for i in items if i["error_type"]]


def test_training_goes_on_from_an_adapter(tmp_path: Path, tiny: Path) -> None:
    first = trained(tmp_path, str(tiny)).folder(CHECKPOINT)
    second = trained(tmp_path, str(first)).folder(CHECKPOINT)
    policy = LocalPolicy.open(PolicyConfig(model=str(second)), cache=tmp_path, listener=lambda *a: None)
    assert torch.isfinite(scores(policy.model)).all()
    plain = trained(tmp_path, str(first), adapter={"rank": 0}).folder(CHECKPOINT)
    assert (plain / "model.safetensors").exists()


def test_another_base_is_refused(tmp_path: Path, tiny: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    folder = trained(tmp_path, str(base)).folder(CHECKPOINT)
    (base / "generation_config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"was trained on .* the model there now has"):
        opened(str(folder), tmp_path)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("composer_base.json", r"without a readable composer_base\.json"),
        ("adapter_model.safetensors", "pickled adapters"),
    ],
)
def test_an_incomplete_adapter_is_refused(tmp_path: Path, tiny: Path, missing: str, words: str) -> None:
    folder = shutil.copytree(trained(tmp_path, str(tiny)).folder(CHECKPOINT), tmp_path / "copy")
    (folder / missing).unlink()
    with pytest.raises(BadInput, match=words):
        opened(str(folder), tmp_path)


def test_an_unknown_target_is_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"no Linear query\. It has: .*q_proj"):
        trained(tmp_path, str(tiny), adapter={**LORA, "targets": ["query"]})


@pytest.mark.parametrize("more", [{"rslora": True}, {"dora": True}, {"targets": ["q_proj", "v_proj"], "dropout": 0.1}])
def test_forms_of_lora(tmp_path: Path, tiny: Path, more: dict[str, Any]) -> None:
    folder = trained(tmp_path, str(tiny), adapter={**LORA, **more}).folder(CHECKPOINT)
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert any("magnitude" in name for name in names) == bool(more.get("dora"))
    assert any("mlp" in name for name in names) == ("targets" not in more)
    assert torch.isfinite(scores(opened(str(folder), tmp_path))).all()


def test_the_same_training_gives_the_same_adapter(tmp_path: Path, tiny: Path) -> None:
    one, other = (trained(tmp_path / name, str(tiny)).folder(CHECKPOINT) for name in "ab")
    assert (one / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("teacher", ["ema", "trust-region"])
def test_a_kept_teacher_needs_no_second_model_under_an_adapter(tmp_path: Path, tiny: Path, teacher: str) -> None:
    run = trained(tmp_path, str(tiny), weights={"sdpo": 1.0}, hints={"teacher": teacher})
    rows = [orjson.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    assert all(row["sdpo/turns"] > 0 and row["sdpo/loss"] >= 0 for row in rows)
