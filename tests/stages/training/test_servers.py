"""Several processes that sample from one server or from one each, and the server of each checked by each."""

import json
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.engine import Engine, running
from support.models import save_tiny
from support.torchrun import start, train_all
from support.trainings import metrics_of

from composer_stages import train
from composer_stages.backends.ranks import Ranks
from composer_stages.policy import server
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs.kinds import CHECKPOINT, ROLLOUT, STEP
from composer_stages.training import weights
from composer_stages.training.plan import TrainPlan

HERE = "http://127.0.0.1:8000/v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def settings(model: Path, engines: list[Engine], **optimisation: Any) -> dict[str, Any]:
    size = {"steps": 3, "prompts_per_step": 4, "generations": 4, "learning_rate": 3e-2, "threads": 1}
    return {
        "env": {"name": "support.environments:GuessEnv"},
        "policy": {"model": f"vllm:{model}", "base_url": engines[0].url, "max_tokens": 12},
        "distribution": {"servers": [engine.url for engine in engines[1:]]},
        "tasks": 3,
        "optimisation": size | optimisation,
        "adapter": {"rank": 4},
    }


def sampled(engine: Engine) -> list[str]:
    """The weights that rollouts were sampled with, in the order of their first rollout."""
    asked = [body["model"] for path, body in engine.requests if "max_tokens" in body and "logprobs" in body]
    return [name.partition("-")[2] or name for name in dict.fromkeys(asked)]


def scored(engine: Engine) -> list[str]:
    """The weights that were compared, each time that they were."""
    asked = [body["model"] for _, body in engine.requests if "prompt_logprobs" in body]
    return [name.partition("-")[2] for name in asked if name != "base"]


@pytest.mark.parametrize(("count", "sharding"), [(1, "none"), (2, "fsdp2")], ids=["one server", "one each"])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_sample_from_the_newest_weights(tmp_path: Path, model: Path, count: int, sharding: str) -> None:
    """The engines answer 500 where a scoring meets another request, as a vLLM on a CPU dies of it."""
    with ExitStack() as stack:
        engines = [stack.enter_context(running(model, lonely=1)) for _ in range(count)]
        given = settings(model, engines)
        given["distribution"]["sharding"] = sharding
        run = train_all(tmp_path, {"run": given}, 2)["run"]
        for engine in engines:
            assert sampled(engine) == ["base", "version-0", "version-1", "version-2"]
            each = 2 // count
            compared = Counter(scored(engine))
            assert list(compared) == [f"version-{v}" for v in range(3)]
            assert min(compared.values()) >= 2 * each, "each process compares, before and after the step"
            loads = [body["lora_name"] for path, body in engine.requests if path.endswith("/load_lora_adapter")]
            assert len(loads) == 3 and engine.most == 2 and not engine.adapters, "one of them loads for all"
    assert len(run.rows(ROLLOUT)) == 3 * 16
    versions = [json.loads(row["sampling_json"])["policy_version"] for row in run.rows(STEP)]
    assert versions == sorted(versions) and set(versions) == {0, 1, 2}
    for line in metrics_of(run):
        assert line["sampling/sync_difference"] < 1e-4
        assert line["sampling/stale_rollouts"] == 0 and line["sampling/sampling_logp_difference/max"] < 1e-4
    assert (run.folder(CHECKPOINT) / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_all_weights_of_two_processes_are_replaced_on_their_servers(tmp_path: Path, model: Path, sharding: str) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(running(model, lonely=1)) for _ in range(2)]
        given = settings(model, engines, learning_rate=3e-3) | {"adapter": {"rank": 0}}
        given["distribution"]["sharding"] = sharding
        run = train_all(tmp_path, {"run": given}, 2)["run"]
        for engine in engines:
            loads = [body["kwargs"]["weights_path"] for path, body in engine.requests if path == "/collective_rpc"]
            assert [Path(place).name for place in loads[:-1]] == [f"version-{number:06d}" for number in range(3)]
    for line in metrics_of(run):
        assert line["sampling/sync_difference"] < 1e-5 and line["sampling/stale_rollouts"] == 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert (run.folder(CHECKPOINT) / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_samples_its_own_rollouts_ahead(tmp_path: Path, model: Path) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(running(model, lonely=1)) for _ in range(2)]
        run = train_all(tmp_path, {"run": settings(model, engines, max_staleness=1)}, 2)["run"]
    stale = [line["sampling/stale_rollouts"] for line in metrics_of(run)]
    assert stale[0] == 0 and max(stale) > 8, "those of both are counted"
    assert all(0 < line["sampling/staleness"] <= 1 for line in metrics_of(run)[1:])
    assert len(run.rows(ROLLOUT)) == 3 * 16


def stopped(tmp_path: Path, given: dict[str, Any]) -> list[str]:
    """What each of two processes said whose training does not come to its end."""
    processes = start(tmp_path, {"run": given}, 2)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode for process in processes)
    return said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_server_with_other_weights_stops_all_processes(tmp_path: Path, model: Path) -> None:
    """The second process finds out; both say which server it is."""
    with running(model) as right, running(model, deaf=1) as wrong:
        said = stopped(tmp_path, settings(model, [right, wrong]))
    assert all(f"After step 1 the server at {wrong.url} samples from other weights" in text for text in said)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_does_not_answer_stops_all_processes(tmp_path: Path, model: Path) -> None:
    with running(model) as right, running(model, textual=1) as wrong:
        said = stopped(tmp_path, settings(model, [right, wrong]))
    assert all("does not answer with the token ids" in text for text in said)


class Told(Ranks):
    """One of several processes that does not talk, but knows what the others would say when asked in this order."""

    def __init__(self, rank: int, *told: list[Any]) -> None:
        super().__init__(rank, len(told[0]))
        self._told = iter(told)

    def gather(self, value: Any) -> list[Any]:
        told = next(self._told)
        assert told[self.rank] == value
        return told


def test_servers_are_taken_in_turn() -> None:
    policy = PolicyConfig(model="vllm:m", base_url=HERE, device="cpu")
    both = train.Config(policy=policy, distribution={"servers": ["http://127.0.0.1:8001/v1"]})
    sampled_from = [TrainPlan(both, None, False, 1, 3).sampled_by(rank) for rank in range(3)]
    urls = [policy.base_url for policy in sampled_from]
    assert urls == [HERE, "http://127.0.0.1:8001/v1", HERE]
    told = [(socket.gethostname(), f"127.0.0.1:{port}") for port in (8000, 8001, 8000)]
    all_of = [Told(rank, told, [2, 1, 2]) for rank in range(3)]
    places = [weights.shared_server(policy, ranks) for policy, ranks in zip(sampled_from, all_of, strict=True)]
    assert [(place.loads, place.turn, place.turns) for place in places] == [(True, 0, 2), (True, 0, 2), (False, 1, 2)]


def test_processes_on_gpus_do_not_take_turns() -> None:
    policy = PolicyConfig(model="vllm:m", base_url="http://10.0.0.1:8000/v1")
    assert server.scoring_lock(policy.base_url or "", "cpu") is None
    place = weights.shared_server(policy, Told(1, [("", "10.0.0.1:8000")] * 2, [1, 1]))
    assert (place.loads, place.turn, place.turns) == (False, 0, 1)


def test_further_servers_need_a_first_one() -> None:
    with pytest.raises(ValueError, match=r"further ones beside policy\.base_url"):
        train.Config(policy={"model": "vllm:m"}, distribution={"servers": [HERE]})
