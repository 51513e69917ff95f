"""Through the real vLLM: equal log-probs, training with verified synchronisation, a killed server, a whole preset."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import real_vllm
from support.command_line import command, environment
from support.models import tiny_tokenizer
from support.several import train_all
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages import collect, train
from stages.policy import vllm
from stages.policy.base import PolicyConfig, Turn
from stages.policy.local import load_model
from stages.policy.server import ModelServer
from stages.policy.vllm import VllmPolicy
from stages.rollouts.trace import by_rollout, prompt_ids
from stages.runs import runner
from stages.runs.artifact import Run
from stages.runs.records import ROLLOUT, STEP
from stages.training.scoring import Tree, score, token_log_probs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(real_vllm.interpreter() is None, reason=real_vllm.MISSING),
]
ROOT = Path(__file__).parents[2]
STUDENT = "kata:student-served"


def quiet(what: str, done: int, of: int) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of this module; COMPOSER_TEST_MODELS may name a folder with models that were made before."""
    folder = tmp_path_factory.mktemp("artifacts")
    if made := os.environ.get("COMPOSER_TEST_MODELS"):
        (folder / "models").symlink_to(made)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ModelServer]:
    config = PolicyConfig(model=f"vllm:{STUDENT}")
    log = root / "vllm.log"
    made = vllm.start(config, log, cache=root / "models", rank=8, listener=quiet, check=lambda: None)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def adapter(root: Path, server: ModelServer) -> Path:
    """The folder of an adapter that one step of training made."""
    size = {"steps": 1, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2}
    config = train.Config(env={"name": "kata"}, policy=policy(server), tasks=4, optimisation=size, adapter={"rank": 8})
    return runner.execute("train", {}, config, root=root).path / "checkpoint"


def policy(server: ModelServer, **more: Any) -> dict[str, Any]:
    return {"model": f"vllm:{STUDENT}", "base_url": server.url, **more}


@torch.no_grad()
def forward(model: Any, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    return token_log_probs(model, score(model, [Tree(prompt, (ids,))]), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollouts_of_kata_have_the_log_probs_of_a_forward_pass(
    root: Path, server: ModelServer, temperature: float
) -> None:
    config = collect.Config(env={"name": "kata"}, policy=policy(server, temperature=temperature), tasks=4, samples=2)
    run = Run(runner.execute("collect", {}, config, root=root).path)
    assert run.manifest.outcome.ok and len(run.rows(ROLLOUT)) == 8
    assert run.manifest.models["policy"]["server"]["logprob_kind"] == "processed"
    model, _ = load_model(PolicyConfig(model=STUDENT), cache=root / "models", listener=quiet)
    asked = VllmPolicy.open(config.policy, cache=root / "models", budget=None, listener=quiet)  # type: ignore[arg-type]
    compared = 0
    for steps in by_rollout(run.rows(STEP)).values():
        for row, prompt in zip(steps, prompt_ids(steps), strict=True):
            assert row["prefix_ok"] and prompt is not None
            ids = row["completion_token_ids"]
            own = forward(model, prompt, ids, temperature)
            torch.testing.assert_close(torch.tensor(row["logprobs"]), own, atol=1e-5, rtol=0)
            compared += len(ids)
        given = torch.tensor(asked.score(prompt or [], ids))
        torch.testing.assert_close(given, forward(model, prompt or [], ids, 1.0), atol=1e-5, rtol=0)
    assert compared > 200


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_training_keep_both_sides_equal(root: Path, server: ModelServer, max_staleness: int) -> None:
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2, "max_staleness": max_staleness}
    config = train.Config(env={"name": "kata"}, policy=policy(server), tasks=4, optimisation=size, adapter={"rank": 8})
    run = Run(runner.execute("train", {}, config, root=root).path)
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    steps = [line for line in lines if "sampling/sync_difference" in line]
    assert [line["sampling/sync_difference"] < 1e-5 for line in steps] == [True] * 3
    assert [line["sampling/stale_rollouts"] for line in steps] == [0, 8 * max_staleness, 8 * max_staleness]
    off = [line["sampling/sampling_logp_difference/max"] for line in steps]
    assert off[0] < 1e-4 and (max(off) < 1e-4) == (max_staleness == 0)


def test_two_processes_train_on_one_server(root: Path, server: ModelServer) -> None:
    """On a CPU it dies where one's comparison meets the other's rollouts."""
    size = {"steps": 3, "prompts_per_step": 4, "generations": 4, "learning_rate": 1e-2, "threads": 1}
    case = {"env": {"name": "kata"}, "policy": policy(server), "tasks": 4, "optimisation": size, "adapter": {"rank": 8}}
    run = train_all(root, {"several": case}, 2)["several"]
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    steps = [line for line in lines if "sampling/sync_difference" in line]
    assert [line["sampling/sync_difference"] < 1e-5 for line in steps] == [True] * 3
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 1e-4
    assert len(run.rows(ROLLOUT)) == 3 * 16


def test_a_teacher_behind_the_server_scores_the_rollouts_of_a_training(root: Path, server: ModelServer) -> None:
    """It is the model that training starts from: at first it says what sampling said, and then no more."""
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2, "threads": 1}
    config = train.Config(
        env={"name": "kata"},
        policy={"model": STUDENT},
        tasks=4,
        optimisation=size,
        weights={"eopd": 1.0},
        eopd={"coefficient": 0.0},
        teacher=policy(server),
    )
    run = Run(runner.execute("train", {}, config, root=root).path)
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    apart = [abs(line["eopd/rev_kl"]) for line in lines if "eopd/rev_kl" in line]
    assert apart[0] < 1e-5 and apart[-1] > 1e-4  # one step alone may move these tokens by less
    assert run.manifest.models["teacher"]["server"]["capture_level"] == "tokens"


def test_a_killed_engine_is_survived_with_its_adapter(root: Path, server: ModelServer, adapter: Path) -> None:
    config = PolicyConfig(model=f"vllm:{STUDENT}", max_tokens=16)
    opened = VllmPolicy.connect(config, server.url, cache=root / "models", listener=quiet, server=server)
    opened.load("trained", adapter)
    opened.take("trained")
    turns = [Turn([{"role": "user", "content": f"question {i}"}], i) for i in range(8)]
    before = opened.sample(turns)
    assert not [sample.error for sample in before if sample.error_type]
    engine = int(subprocess.check_output(["pgrep", "-g", str(server.pid), "-f", "EngineCore"]).split()[0])
    os.kill(engine, signal.SIGKILL)
    after = opened.sample(turns)
    assert not [sample.error for sample in after if sample.error_type] and server.restarts == 1
    prompt, ids = before[0].prompt_ids or [], before[0].completion_ids or []
    trained, _ = load_model(PolicyConfig(model=str(adapter)), cache=root / "models", listener=quiet)
    given = torch.tensor(opened.score(prompt, ids))
    torch.testing.assert_close(given, forward(trained, prompt, ids, 1.0), atol=1e-4, rtol=0)


def real_architecture(folder: Path) -> Path:
    """A tiny random Qwen3 in place of Qwen3-8B, whose output head is not tied to the embeddings, either."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=40960,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_all_weights_are_replaced_on_the_server(tmp_path: Path, processes: int) -> None:
    """One process starts its server itself; two train in shares on one that is there."""
    model = real_architecture(tmp_path / "model")
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-3, "threads": 1}
    played: dict[str, Any] = {"model": f"vllm:{model}", "max_tokens": 16}
    case = {"env": {"name": "kata"}, "policy": played, "tasks": 4, "max_steps": 2, "optimisation": size}
    case["adapter"] = {"rank": 0}
    if processes == 1:
        run = Run(runner.execute("train", {}, train.Config.model_validate(case), root=tmp_path).path)
    else:
        given = PolicyConfig.model_validate(played)
        here = {"cache": tmp_path, "rank": 8, "replaceable": True, "listener": quiet, "check": lambda: None}
        made = vllm.start(given, tmp_path / "vllm.log", **here)
        played["base_url"], case["distribution"] = made.url, {"sharding": "fsdp2"}
        try:
            run = train_all(tmp_path, {"run": case}, processes)["run"]
        finally:
            made.stop()
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    steps = [line for line in lines if "sampling/sync_difference" in line]
    assert [line["sampling/sync_difference"] < 1e-5 for line in steps] == [True] * 3
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 1e-4
    versions = {json.loads(row["sampling_json"])["policy_version"] for row in run.rows(STEP)}
    assert versions == {0, 1, 2}


def test_a_real_architecture_goes_through_the_preset_to_a_verdict(tmp_path: Path) -> None:
    """The same file, the same server as with Qwen3-8B."""
    real_architecture(tmp_path / "model")
    smaller = ["train.policy.max_tokens=8", "train.tasks=4", "train.max_steps=2", "evaluate.tasks=6"]
    smaller += [f"train.optimisation.{name}=2" for name in ("steps", "prompts_per_step", "generations")]
    words = [word for setting in smaller for word in ("--set", setting)]
    preset = ["run", "--preset", "examples/real-model.toml", "--policy", str(tmp_path / "model"), "--json", *words]
    done = subprocess.run(
        command(*preset), capture_output=True, text=True, cwd=ROOT, env=environment(tmp_path / "artifacts")
    )
    assert done.returncode in (1, 3), done.stderr
    said = json.loads(done.stdout)
    assert "verdict" in json.dumps(said)
    (run,) = (tmp_path / "artifacts" / "train").glob("2*")
    assert (run / "checkpoint" / "adapter_model.safetensors").is_file() and (run / "logs" / "vllm.log").is_file()
    (judged,) = (tmp_path / "artifacts" / "evaluate").glob("2*")
    assert json.loads((judged / "verdict.json").read_text())["decision"] != "INVALID-RUN"
    assert not subprocess.run(["pgrep", "-f", str(tmp_path / "model")], capture_output=True, check=False).stdout
