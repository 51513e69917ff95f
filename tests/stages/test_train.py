"""train: whole models and adapters, channels, teachers, several processes; equal trainings, equal bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from safetensors.torch import load_file
from support.broken_models import broken
from support.environments import GuessEnv
from support.models import save_tiny
from support.server import Reply, answer, serving
from support.trainings import ENV, LORA, checkpoint_bytes, metrics_of, settings, trained, words_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_stages import collect, evaluate, export, extract_pairs, train
from composer_stages.envs.base import Task
from composer_stages.errors import BadInput, UsageError
from composer_stages.messages import Message
from composer_stages.policy import adapters
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.runs import runner, store
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM, HINT, PAIR, ROLLOUT, STEP, TRAINING_REWARD
from composer_stages.runs.run import Run
from composer_stages.stopping import Interrupted
from composer_stages.training.channels import CHANNELS
from composer_stages.training.scoring import Tree, score, token_log_probs

TESTS = Path(__file__).resolve().parents[1]
TREE = Tree([5, 6, 7], ([8, 9, 10], [4, 5]))
ONE = {"steps": 1}


@pytest.fixture
def arm(artifacts: Path, tiny: Path) -> Run:
    """A training of all weights by GRPO alone."""
    return trained(artifacts, tiny)


@pytest.fixture
def adapted(artifacts: Path, tiny: Path) -> Run:
    """A training of an adapter by GRPO alone."""
    return trained(artifacts, tiny, adapter=LORA)


@torch.no_grad()
def scores(model: str, cache: Path, **more: Any) -> torch.Tensor:
    """Log-probs of a tree's tokens under a model that is opened as a policy."""
    opened = load_model(PolicyConfig(model=model), listener=lambda *told: None, **more)[0].eval()
    return token_log_probs(opened, score(opened, [TREE]))


# What a run holds


@pytest.mark.parametrize("more", [{}, {"adapter": LORA}], ids=["whole", "adapter"])
def test_the_same_training_gives_the_same_bytes(
    tmp_path: Path, artifacts: Path, tiny: Path, more: dict[str, Any]
) -> None:
    assert checkpoint_bytes(trained(tmp_path, tiny, **more)) == checkpoint_bytes(trained(artifacts, tiny, **more))


def test_rollouts_and_rewards_are_tables_of_the_run(arm: Run) -> None:
    rollouts, rewards = arm.rows(ROLLOUT), arm.rows(TRAINING_REWARD)
    assert len(rollouts) == len(rewards) == 2 * 2 * 4 and {row["source"] for row in rollouts} == {"train"}
    assert [row["rollout_id"] for row in rollouts] == [row["rollout_id"] for row in rewards]
    assert {row["rollout_id"] for row in arm.rows(STEP)} == {row["rollout_id"] for row in rollouts}
    for step, logged in enumerate(metrics_of(arm)):
        paid = [row["reward"] for row in rewards if row["training_step"] == step]
        assert sum(paid) / len(paid) == pytest.approx(logged["reward"], abs=1e-6)
    assert arm.rows(HINT) == []


def test_metrics_can_be_read_while_the_training_goes_on(tmp_path: Path, tiny: Path) -> None:
    seen: list[int] = []

    def listener(what: str, done: int, total: int) -> None:
        seen.extend(len(path.read_bytes().splitlines()) for path in tmp_path.glob("train/2*/metrics.jsonl"))

    config = settings(tiny)
    run = Run(runner.execute("train", {}, config, root=tmp_path, listener=listener).path)
    assert seen and 1 <= seen[0] <= 2 and seen == sorted(seen)
    assert [line["step"] for line in metrics_of(run)] == [1, 2]


def test_a_training_whose_rewards_are_all_equal_is_reported(tmp_path: Path, tiny: Path, arm: Run) -> None:
    indifferent = {"name": "support.environments:IndifferentEnv"}
    equal = trained(tmp_path, tiny, env=indifferent, policy={"max_tokens": 8}, optimisation=ONE)
    for run, expected in ((equal, True), (arm, False)):
        assert run.manifest.summary["all_rewards_equal"] is expected
        assert ("nothing was learned" in (run.path / "report.txt").read_text()) is expected


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"weights": {"taid": 1.0}}, "teacher"),
        ({"hints": {"source": "llm"}}, r"hints\.llm"),
        ({"policy": {"temperature": 0.0}}, "advantage"),
        ({"policy": {"base_url": "http://x"}}, "cannot be trained"),
        ({"pairs": {"loss_type": "exo_pair"}}, "loss_type"),
        ({"optimisation": {"max_staleness": 1}}, "max_staleness needs rollouts from a server"),
    ],
)
def test_settings_that_cannot_work_are_refused(more: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        train.Config(**more)


def test_what_cannot_be_trained_is_refused_before_the_first_rollout(tmp_path: Path, tiny: Path, pairs: Run) -> None:
    stranger = save_tiny(tmp_path / "other", characters="abcdefghijkm\u0120")
    refused: list[tuple[str, dict[str, Any]]] = [
        (r"weights\.dpo is 1", {"weights": {"dpo": 1.0}}),
        ("no channel uses them", {"pairs": pairs}),
        (r"token 12 is 'm' there and 'l' here", {"weights": {"taid": 1.0}, "teacher": {"model": str(stranger)}}),
        (r"no Linear query\. It has: .*q_proj", {"adapter": {**LORA, "targets": ["query"]}}),
    ]
    for words, more in refused:
        with pytest.raises(UsageError, match=words):
            trained(tmp_path, tiny, **more)
    assert not list(tmp_path.glob("train/2*"))


def test_a_broken_folder_is_named(tmp_path: Path) -> None:
    folder = broken("generation settings cut", tmp_path / "model")
    with pytest.raises(BadInput, match=r"generation_config\.json"):
        trained(tmp_path, folder)


# Channels and teachers


def test_a_pair_of_two_runs_counts_once(artifacts: Path, tiny: Path, pairs: Run) -> None:
    """Two extractions from one collection, by other settings."""
    given = {name: Run(Path(ref[0].path)) for name, ref in pairs.manifest.inputs.items()}
    other = extract_pairs.Config(compare="canonical", outcome="ignore")
    again = Run(runner.execute("extract-pairs", given, other, root=artifacts).path)
    config = settings(tiny, weights={"sft": 1.0}, optimisation={"steps": 1}, pairs={"per_step": 2})
    run = Run(runner.execute("train", {"pairs": [pairs, again]}, config, root=artifacts).path)
    counts, rows = run.manifest.counts, [row for each in (pairs, again) for row in each.rows(PAIR)]
    number = len({row["pair_id"] for row in rows})
    assert counts["pairs"] == number and counts["pairs_dropped_duplicate"] == len(pairs.rows(PAIR))
    further, played = CheckpointInfo.of(run).further_tasks, given["rollouts"].manifest.config["env"]["name"]
    assert {env: {*ids} for env, ids in further.items()} == {played: {row["task_id"] for row in rows}}


def test_any_micro_batch_is_the_same_step(tmp_path: Path, artifacts: Path, tiny: Path, pairs: Run) -> None:
    """More micro-batches than pairs too; every channel, gradient norms and cosines among them."""
    teacher = {"model": str(save_tiny(tmp_path / "teacher", seed=5))}

    def row(**micro: int) -> dict[str, Any]:
        size = {"steps": 1, "gradient_cosine_every": 1, **micro}
        more: dict[str, Any] = {"weights": dict.fromkeys(CHANNELS, 1.0), "hints": {"per_step": 3}, "teacher": teacher}
        config = settings(tiny, policy={"max_tokens": 12}, optimisation=size, **more, pairs={"per_step": 2})
        return metrics_of(Run(runner.execute("train", {"pairs": pairs}, config, root=artifacts).path))[0]

    whole = row()
    assert {f"gradient/norm/{name}" for name in ("grpo", *CHANNELS)} <= whole.keys()
    assert -1.0 <= whole["gradient/cosine/dpo~sft"] <= 1.0
    compared = [n for n in whole if n.partition("/")[0] in {*CHANNELS, "gradient"} or n in ("loss", "grad_norm")]
    compared.remove("dpo/accuracy")  # of margins that are 0 before the first step: rounding decides their sign
    cut = row(micro_batch=1, max_tokens_per_micro_batch=40)
    for name in compared:
        assert cut[name] == pytest.approx(whole[name], rel=1e-3, abs=2e-4), name


@pytest.mark.parametrize(
    ("hints", "adapter"), [({"source": "rollout", "success_reward": 0.05}, {}), ({"teacher": "trust-region"}, LORA)]
)
def test_self_distillation_in_upstreams_modes(
    artifacts: Path, tiny: Path, hints: dict[str, Any], adapter: dict[str, Any]
) -> None:
    run = trained(artifacts, tiny, "D", weights={"sdpo": 1.0}, hints=hints, adapter=adapter, optimisation=ONE)
    assert all(row["sdpo/loss"] >= 0 and row["sdpo/turns"] > 0 < row["sdpo/denominator"] for row in metrics_of(run))
    if hints.get("source") == "rollout":
        shown = {row["source"] for row in run.rows(HINT)}
        assert shown and shown <= {row["rollout_id"] for row in run.rows(ROLLOUT)}


def test_hints_of_a_model_are_asked_at_once_for_the_turns_that_are_used(tmp_path: Path, tiny: Path) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def reply(body: dict[str, Any], n: int) -> Reply:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.2)
        with lock:
            now -= 1
        return Reply(body=answer(f"Think of {n % 3}."))

    with serving(reply) as server:
        hints = {"source": "llm", "llm": {"model": "adviser", "base_url": server.url}, "per_step": 4}
        run = trained(tmp_path, tiny, "D", weights={"sdpo": 1.0}, hints=hints)
        assert len(server.requests) <= 2 * 4 and most > 1
    rows = run.rows(HINT)
    assert [row["training_step"] for row in rows] == [0] * 4 + [1] * 4
    assert {row["source"] for row in rows} == {"adviser"} and all(row["hint"].startswith("Hint: Think") for row in rows)
    assert [row["sdpo/turns"] for row in metrics_of(run)] == [4.0, 4.0]


def test_a_teacher_whose_head_is_padded_teaches(tmp_path: Path, tiny: Path) -> None:
    padded = tmp_path / "padded"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    model.resize_token_embeddings(len(tokenizer) + 13, mean_resizing=False)
    model.save_pretrained(padded)
    tokenizer.save_pretrained(padded)
    weights = {"taid": 1.0, "eopd": 1.0}
    plain, wide = (
        metrics_of(trained(tmp_path, tiny, "T", weights=weights, teacher={"model": str(path)}, optimisation=ONE))[0]
        for path in (tiny, padded)
    )
    assert plain["taid/loss"] == pytest.approx(wide["taid/loss"], rel=1e-6)
    assert plain["eopd/loss"] == pytest.approx(wide["eopd/loss"], rel=1e-6, abs=1e-7)


# Adapters: the base stays as it is, a checkpoint knows its base, and stages take it as a policy


def test_a_checkpoint_is_an_adapter_in_float32_with_its_base(adapted: Run, tiny: Path) -> None:
    folder = adapted.folder(CHECKPOINT)
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "composer_base.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names and not [name for name in names if name.endswith((".bin", ".pt"))]
    weights = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32} and not [n for n in weights if "head" in n]
    assert all(tensor.abs().sum() > 0 for name, tensor in weights.items() if "lora_B" in name), "nothing was learned"
    record = orjson.loads((folder / "composer_base.json").read_bytes())
    assert (record["model"], record["dtype"]) == (str(tiny), "float32")


def test_only_the_file_names_the_base_as_the_user_wrote_it(tmp_path: Path, tiny: Path) -> None:
    """When a model is saved, peft looks for the config of its base, on the hub if the name is not a folder."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2, target_modules=["q_proj"]))
    base = adapters.AdapterBase(model="world:student", weights="0", dtype="float32")
    adapters.save_adapter(model, base, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == base.model
    assert model.peft_config["default"].base_model_name_or_path == str(tiny)


def test_the_folder_of_a_model_is_hashed_once_in_a_training(tmp_path: Path, tiny: Path) -> None:
    """Settings, checkpoint and adapter's record all name it by its bytes, which may be many."""
    model = shutil.copytree(tiny, tmp_path / "model")
    newest = max(path.stat().st_ctime for path in model.iterdir())
    time.sleep(max(0.0, newest + store.CTIME_MARGIN_S + 0.1 - time.time()))  # files that change are hashed again
    read, listening = [0], [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and arguments[0] == str(model / "model.safetensors"):
            read[0] += 1

    sys.addaudithook(hook)
    trained(tmp_path, model, adapter=LORA, optimisation=ONE)
    listening.clear()
    assert read[0] == 1


def test_an_adapter_can_be_left_beside_its_base_or_merged(tmp_path: Path, tiny: Path) -> None:
    run = trained(tmp_path, tiny, optimisation=ONE | {"learning_rate": 1e-2}, adapter={**LORA, "dora": True})
    folder = run.folder(CHECKPOINT)
    assert any("magnitude" in name for name in load_file(folder / "adapter_model.safetensors"))
    beside, start = scores(str(folder), tmp_path, merged=False), scores(str(tiny), tmp_path)
    assert (beside - start).abs().max() > 1e-3
    torch.testing.assert_close(beside, scores(str(folder), tmp_path), atol=1e-5, rtol=1e-4)
    written = Run(runner.execute("export", {"checkpoint": run}, export.Config(format="model"), root=tmp_path).path)
    for model in (folder, written.path / "model"):
        (info,) = adapters.trainings_of({"named": PolicyConfig(model=str(model))})
        assert info == CheckpointInfo.of(run).model_copy(update={"arm": "named"})
    torch.testing.assert_close(scores(str(written.path / "model"), tmp_path), beside, atol=1e-5, rtol=1e-4)
    merged, base = (load_file(path / "model.safetensors") for path in (written.path / "model", tiny))
    assert merged.keys() == base.keys()
    assert written.manifest.counts["changed_weights"] > 0.9 * written.manifest.counts["adapted_weights"]


def test_forms_of_lora(tmp_path: Path, tiny: Path) -> None:
    more = {"rslora": True, "targets": ["q_proj", "v_proj"], "dropout": 0.1}
    folder = trained(tmp_path, tiny, adapter={**LORA, **more}, optimisation=ONE).folder(CHECKPOINT)
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert names and not any("mlp" in name for name in names)
    assert json.loads((folder / "adapter_config.json").read_text())["use_rslora"] is True
    assert torch.isfinite(scores(str(folder), tmp_path)).all()


class StoppingEnv(GuessEnv):
    """Gets a signal at the reset with this number, counted over all of them."""

    resets, stop_at = 0, 0

    def reset(self, task: Task) -> list[Message]:
        """Count, then as in GuessEnv."""
        StoppingEnv.resets += 1
        if StoppingEnv.resets == StoppingEnv.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().reset(task)


def test_a_training_stopped_while_it_samples_keeps_its_steps_and_ends_in_the_same_adapter(
    tmp_path: Path, tiny: Path
) -> None:
    config = settings(tiny, env={"name": f"{__name__}:StoppingEnv"}, adapter=LORA)
    whole = Run(runner.execute("train", {}, config, root=tmp_path / "whole").path)
    StoppingEnv.stop_at = StoppingEnv.resets + 8 + 4  # in the second step, of 8 rollouts each
    with pytest.raises(Interrupted):
        runner.execute("train", {}, config, root=tmp_path)
    assert [path.name for path in tmp_path.glob("train/2*/scratch/trainer/checkpoint-*")] == ["checkpoint-1"]
    resumed = Run(runner.execute("train", {}, config, root=tmp_path, resume=True).path)
    assert checkpoint_bytes(resumed) == checkpoint_bytes(whole)


def test_the_reference_is_the_base_with_the_adapter_off(tmp_path: Path, tiny: Path) -> None:
    """No second copy: GRPO's KL is zero while the adapter still is, and the trainer holds one model."""
    run = trained(tmp_path, tiny, optimisation={"beta": 0.5, "learning_rate": 1e-2}, adapter=LORA)
    first, second = metrics_of(run)
    # Each token's is exp(d) - d - 1 of a difference d that is 0 but for the rounding of float32 log-probs, some eps.
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-4
    assert "ref" not in {path.name for path in run.folder(CHECKPOINT).iterdir()}


def test_collect_and_evaluate_take_an_adapter_as_a_policy(tmp_path: Path, adapted: Run) -> None:
    policy = {"model": str(adapted.folder(CHECKPOINT)), "max_tokens": 16}
    rollouts = collect.Config(env={"name": ENV}, policy=policy, tasks=2, samples=2)
    assert len(Run(runner.execute("collect", {}, rollouts, root=tmp_path).path).rows(ROLLOUT)) == 4
    compare = evaluate.Config(env={"name": ENV, "split": "eval"}, tasks=2, baseline="start", treatment="A")
    items = Run(runner.execute("evaluate", {"arms": adapted}, compare, root=tmp_path).path).rows(EVAL_ITEM)
    assert {item["arm"] for item in items} == {"A", "start"} and not [i for i in items if i["error_type"]]


def test_training_goes_on_from_an_adapter(tmp_path: Path, adapted: Run) -> None:
    first = adapted.folder(CHECKPOINT)
    second = trained(tmp_path, first, adapter=LORA, optimisation=ONE).folder(CHECKPOINT)
    assert torch.isfinite(scores(str(second), tmp_path)).all()
    assert not store.read_json(second / "adapter_config.json")["base_model_name_or_path"]
    assert (trained(tmp_path, first, optimisation=ONE).folder(CHECKPOINT) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("another base", r"was trained on .* the model there now has"),
        ("composer_base.json", r"composer_base\.json"),
        ("adapter_model.safetensors", "pickled adapters"),
    ],
)
def test_an_adapter_that_is_incomplete_or_of_another_base_is_refused(
    tmp_path: Path, adapted: Run, damage: str, words: str
) -> None:
    folder = shutil.copytree(adapted.folder(CHECKPOINT), tmp_path / "copy")
    if damage == "another base":
        record = orjson.loads((folder / "composer_base.json").read_bytes())
        other = shutil.copytree(record["model"], tmp_path / "base")
        (other / "generation_config.json").write_text("{}")
        (folder / "composer_base.json").write_bytes(orjson.dumps({**record, "model": str(other)}))
    else:
        (folder / damage).unlink()
    with pytest.raises(BadInput, match=words):
        scores(str(folder), tmp_path)


# Several processes under torchrun: one run, one voice, and nothing left waiting


def torchrun(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Two processes of the command."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "composer_cli"]
    return subprocess.run(
        [sys.executable, *program, *words, "--artifacts", str(root)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_run_by_two_processes(tmp_path: Path, tiny: Path) -> None:
    size = ("steps=1", "prompts_per_step=2", "generations=2")
    words = words_of(tiny, "tasks=2", *(f"optimisation.{part}" for part in size))
    done = torchrun(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("train/2*")
    run = Run(folder)
    assert done.stdout.strip().endswith(str(folder)) and done.stdout.count("arm A") == 1
    assert done.stderr.count("train: starts") == 1
    assert run.manifest.models["policy"]["training"]["processes"] == 2
    assert len(run.rows(ROLLOUT)) == 4

    again = torchrun(tmp_path, *words)
    assert again.returncode == 0 and again.stderr.count("up to date") == 1, again.stderr

    refused = torchrun(tmp_path, *words, "--set", "optimisation.loss_type=bnpo")
    assert refused.returncode != 0 and refused.stderr.count("processes would take another step than one") == 1
    assert len(list(tmp_path.glob("train/2*"))) == 1

    other = torchrun(tmp_path, "collect", "--limit", "1")
    assert other.returncode != 0 and "composer collect runs in one process, and this is one of 2" in other.stderr
    assert not (tmp_path / "collect").exists()
