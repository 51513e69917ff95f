"""Through the real vLLM: equal log-probs, training with verified synchronisation, a killed server, a whole preset."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from needs import needs
from safetensors.torch import load_file
from support.command_line import command, environment
from support.models import tiny_tokenizer
from support.torchrun import train_all
from transformers import Qwen3Config, Qwen3ForCausalLM

from composer_stages import collect, train
from composer_stages.errors import UsageError
from composer_stages.policy import ask_all, server as model_server
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.local import load_model
from composer_stages.policy.server import ModelServer
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.rollouts.trace import by_rollout, prompt_ids
from composer_stages.runs import runner
from composer_stages.runs.kinds import CHECKPOINT, ROLLOUT, STEP
from composer_stages.runs.run import Run
from composer_stages.training.scoring import Tree, score, token_log_probs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs("vllm")]
ROOT = Path(__file__).parents[2]
VARIED = {"name": "support.environments:VariedEnv"}
"""Where rewards are all equal, no step changes a weight, and a server that is never updated goes unnoticed."""
ANSWER = 24
"""Tokens of an answer at most."""


def quiet(what: str, done: int, of: int) -> None:
    """Nobody listens."""


def real_architecture(folder: Path, seed: int = 0) -> Path:
    """A tiny random Qwen3 in place of Qwen3-8B, whose output head is not tied to the embeddings, either."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
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
    made = Qwen3ForCausalLM(shape)
    # An answer that is cut is not carried out and is worth nothing, so 17 of the 259 tokens end one.
    made.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(1, 17)]
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of this module."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_architecture(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(root: Path, model: Path) -> Iterator[ModelServer]:
    config = PolicyConfig(model=f"vllm:{model}", max_tokens=ANSWER)
    log = root / "vllm.log"
    made = model_server.start(config, log, rank=8, listener=quiet, check=lambda: None)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def policy(server: ModelServer, model: Path) -> dict[str, Any]:
    """Settings of the policy behind the server."""
    return {"model": f"vllm:{model}", "base_url": server.url, "max_tokens": ANSWER}


@pytest.fixture(scope="module")
def adapter(root: Path, policy: dict[str, Any]) -> Path:
    """The folder of an adapter that one step of training made."""
    size = {"steps": 1, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2}
    config = train.Config(env=VARIED, policy=policy, tasks=4, optimisation=size, adapter={"rank": 8})
    return runner.execute("train", {}, config, root=root).path / "checkpoint"


def metrics(run: Run, logged: str) -> list[dict[str, Any]]:
    """The lines of a training's metrics that hold this one."""
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    return [line for line in lines if logged in line]


def synchronised(run: Run) -> list[dict[str, Any]]:
    """The three steps of a training, each of which changed the weights and found them on the server afterwards."""
    steps = metrics(run, "sampling/sync_difference")
    assert [line["sampling/sync_difference"] < 1e-5 and line["grad_norm"] > 1e-4 for line in steps] == [True] * 3
    return steps


@torch.no_grad()
def forward(model: Any, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    return token_log_probs(model, score(model, [Tree(prompt, (ids,))]), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollouts_have_the_log_probs_of_a_forward_pass(
    root: Path, policy: dict[str, Any], model: Path, temperature: float
) -> None:
    config = collect.Config(env=VARIED, policy={**policy, "temperature": temperature}, tasks=4, samples=2)
    run = Run(runner.execute("collect", {}, config, root=root).path)
    assert not any(row["error_type"] for row in run.rows(ROLLOUT)) and len(run.rows(ROLLOUT)) == 8
    assert run.manifest.models["policy"]["server"]["logprob_kind"] == "processed"
    loaded, _ = load_model(PolicyConfig(model=str(model)), listener=quiet)
    asked = VllmPolicy.open(config.policy, cache=root / "models", budget=None, listener=quiet)  # type: ignore[arg-type]
    compared = 0
    for steps in by_rollout(run.rows(STEP)).values():
        for row, prompt in zip(steps, prompt_ids(steps), strict=True):
            assert row["prefix_ok"] and prompt is not None
            ids = row["completion_token_ids"]
            own = forward(loaded, prompt, ids, temperature)
            torch.testing.assert_close(torch.tensor(row["logprobs"]), own, atol=1e-5, rtol=0)
            compared += len(ids)
        given = torch.tensor(asked.score(prompt or [], ids))
        torch.testing.assert_close(given, forward(loaded, prompt or [], ids, 1.0), atol=1e-5, rtol=0)
    assert compared > 100


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_training_keep_both_sides_equal(root: Path, policy: dict[str, Any], max_staleness: int) -> None:
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2, "max_staleness": max_staleness}
    config = train.Config(env=VARIED, policy=policy, tasks=4, optimisation=size, adapter={"rank": 8})
    steps = synchronised(Run(runner.execute("train", {}, config, root=root).path))
    assert [line["sampling/stale_rollouts"] > 0 for line in steps] == [False, max_staleness > 0, max_staleness > 0]
    off = [line["sampling/sampling_logp_difference/max"] for line in steps]
    assert off[0] < 1e-4 and (max(off) < 1e-4) == (max_staleness == 0)


def test_two_processes_train_on_one_server(root: Path, policy: dict[str, Any]) -> None:
    """On a CPU it dies where one's comparison meets the other's rollouts."""
    size = {"steps": 3, "prompts_per_step": 4, "generations": 4, "learning_rate": 1e-2, "threads": 1}
    case = {"env": VARIED, "policy": policy, "tasks": 4, "optimisation": size, "adapter": {"rank": 8}}
    run = train_all(root, {"several": case}, 2)["several"]
    assert max(line["sampling/sampling_logp_difference/max"] for line in synchronised(run)) < 1e-4
    assert len(run.rows(ROLLOUT)) == 3 * 16


def test_a_teacher_behind_the_server_scores_the_rollouts_of_a_training(
    root: Path, policy: dict[str, Any], model: Path
) -> None:
    """It is the model that training starts from: at first it says what sampling said, and then no more."""
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-2, "threads": 1}
    config = train.Config(
        env=VARIED,
        policy={"model": str(model), "max_tokens": ANSWER},
        tasks=4,
        optimisation=size,
        weights={"opd": 1.0},
        opd={"form": "sampled"},
        teacher=policy,
    )
    run = Run(runner.execute("train", {}, config, root=root).path)
    apart = [abs(line["opd/rev_kl"]) for line in metrics(run, "opd/rev_kl")]
    assert apart[0] < 1e-5 and apart[-1] > 1e-4  # one step alone may move these tokens by less
    assert run.manifest.models["teacher 1"]["server"]["capture_level"] == "tokens"


def test_a_teacher_s_likeliest_tokens_teach_as_those_of_one_here(
    root: Path, policy: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Its embeddings are padded to 320 tokens, of which the tokenizer has 259."""
    student = real_architecture(tmp_path / "student", seed=1)

    def taught(name: str, teacher: dict[str, Any], top_k: int = 20) -> tuple[torch.Tensor, list[dict[str, float]]]:
        config = train.Config(
            env=VARIED,
            policy={"model": str(student), "max_tokens": ANSWER, "temperature": 0.7},
            tasks=4,
            optimisation={"steps": 2, "prompts_per_step": 2, "generations": 2, "learning_rate": 0.05, "threads": 1},
            weights={"opd": 1.0},
            opd={"top_k": top_k, "beta": 0.5},
            trl={"optim": "sgd"},
            teacher=teacher,
        )
        run = Run(runner.execute("train", {}, config, root=tmp_path / name).path)
        trained = load_file(run.folder(CHECKPOINT) / "model.safetensors")
        logged = [
            {key: line[key] for key in line if key.startswith("opd/")} for line in metrics(run, "opd/divergence_max")
        ]
        return torch.cat([value.flatten() for _, value in sorted(trained.items())]), logged

    served, told = taught("served", policy)
    here, own = taught("here", {"model": str(model)})
    other, _ = taught("other", {"model": str(student)})
    assert float((served - here).abs().max()) < 1e-6 < 1e-4 < float((other - here).abs().max())
    for line, expected in zip(told, own, strict=True):
        assert line == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UsageError, match=r"the 21 likeliest tokens: .* Start it with --max-logprobs 21 or more"):
        taught("too many", policy, top_k=21)


def test_a_killed_engine_is_survived_with_its_adapter(
    root: Path, server: ModelServer, model: Path, adapter: Path
) -> None:
    config = PolicyConfig(model=f"vllm:{model}", max_tokens=16)
    opened = VllmPolicy.connect(config, server.url, listener=quiet, server=server)
    opened.load("trained", adapter)
    opened.sample_from("trained")
    turns = [Turn([{"role": "user", "content": f"question {i}"}], i) for i in range(8)]
    before = ask_all(opened, turns)
    assert not [sample.error for sample in before if sample.error_type]
    engine = int(subprocess.check_output(["pgrep", "-g", str(server.pid), "-f", "EngineCore"]).split()[0])
    os.kill(engine, signal.SIGKILL)
    after = ask_all(opened, turns)
    assert not [sample.error for sample in after if sample.error_type] and server.restarts == 1
    prompt, ids = before[0].prompt_ids or [], before[0].completion_ids or []
    trained, _ = load_model(PolicyConfig(model=str(adapter)), listener=quiet)
    given = torch.tensor(opened.score(prompt, ids))
    torch.testing.assert_close(given, forward(trained, prompt, ids, 1.0), atol=1e-4, rtol=0)


def test_a_server_left_paused_is_refused(tmp_path: Path, model: Path) -> None:
    given = PolicyConfig(model=f"vllm:{model}", max_tokens=4, timeout_s=60.0)
    here = {"rank": 8, "replaceable": True, "listener": quiet, "check": lambda: None}
    made = model_server.start(given, tmp_path / "vllm.log", **here)
    try:
        base = made.url.removesuffix("/v1")
        urlopen(f"{base}/pause?mode=keep", b"")
        once = given.model_copy(update={"max_attempts": 1})
        with pytest.raises(UsageError, match=f"is paused .* `curl -X POST {base}/resume`"):
            VllmPolicy.connect(once, f"{made.url}/", listener=quiet)
        urlopen(f"{base}/resume", b"")
        assert VllmPolicy.connect(given, made.url, listener=quiet).server_facts.context_tokens
    finally:
        made.stop()


@pytest.mark.parametrize(("processes", "max_staleness"), [(1, 0), (2, 0), (1, 1)])
def test_all_weights_are_replaced_on_the_server(
    tmp_path: Path, model: Path, processes: int, max_staleness: int
) -> None:
    """One process starts its server itself; two train in shares on one that is there."""
    size = {"steps": 3, "prompts_per_step": 2, "generations": 4, "learning_rate": 1e-3, "threads": 1}
    size["max_staleness"] = max_staleness
    played: dict[str, Any] = {"model": f"vllm:{model}", "max_tokens": 16}
    case = {"env": VARIED, "policy": played, "tasks": 4, "max_steps": 2, "optimisation": size}
    case["adapter"] = {"rank": 0}
    if processes == 1:
        said, config = list[str](), train.Config.model_validate(case)
        done = runner.execute("train", {}, config, root=tmp_path, listener=lambda what, *_: said.append(what))
        run = Run(done.path)
        assert said and not [what for what in said if "weights travel by files" in what], "it reads our memory"
    else:
        given = PolicyConfig.model_validate(played)
        here = {"rank": 8, "replaceable": True, "listener": quiet, "check": lambda: None}
        made = model_server.start(given, tmp_path / "vllm.log", **here)
        played["base_url"], case["distribution"] = made.url, {"sharding": "fsdp2"}
        try:
            run = train_all(tmp_path, {"run": case}, processes)["run"]
        finally:
            made.stop()
    if max_staleness:  # weights are replaced while rollouts are played
        assert [line["sampling/stale_rollouts"] > 0 for line in synchronised(run)] == [False, True, True]
        return
    assert max(line["sampling/sampling_logp_difference/max"] for line in synchronised(run)) < 1e-4
    # The last rollouts are not those of the model that the server began with.
    start, _ = load_model(PolicyConfig(model=str(model)), listener=quiet)
    apart = dict.fromkeys(range(3), 0.0)
    for steps in by_rollout(run.rows(STEP)).values():
        for row, prompt in zip(steps, prompt_ids(steps), strict=True):
            given = torch.tensor(row["logprobs"]) - forward(start, prompt or [], row["completion_token_ids"], 1.0)
            version = json.loads(row["sampling_json"])["policy_version"]
            apart[version] = max(apart[version], float(given.abs().max()))
    assert apart[0] < 1e-5 and 1e-3 < apart[1] < apart[2]


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
