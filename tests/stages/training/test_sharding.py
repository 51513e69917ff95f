"""Masters, gradients and moments spread over processes: the same steps, checkpoints that any number goes on from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_tiny
from support.several import direction_run, pairs_run, train_all
from transformers import Qwen3ForCausalLM

from stages.errors import UsageError
from stages.runs import store
from stages.runs.kinds import CHECKPOINT
from stages.train import Config
from stages.training.channels import CHANNELS
from stages.training.plan import ModelShape, Room, TrainPlan, check_memory, estimate_memory
from tests.stages.training.test_processes import at_a_checkpoint, compare, settings, weights_apart

SHARDED = {"distribution": {"sharding": "fsdp2"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher, and pairs."""
    made = tmp_path_factory.mktemp("sharding")
    save_tiny(made / "student")
    save_tiny(made / "teacher", seed=5)
    pairs_run(made / "pairs", 12)
    direction_run(made / "direction", 4)
    return made


def cases(folder: Path) -> dict[str, Any]:
    """All channels at once, in one pass and in parts; the reference of a KL; AdamW; recomputed activations; a hack
    direction that is taken out.
    """
    every = tuple(CHANNELS)
    return {
        "all": settings(folder, every, **SHARDED),
        "all-cut": settings(folder, every, {"micro_batch": 2, "max_tokens_per_micro_batch": 60}, **SHARDED),
        "plain": settings(folder, (), {"keep_every": 1}, **SHARDED),
        "kl": settings(folder, ("sdpo",), {"beta": 0.1}, **SHARDED),
        "recomputed": settings(folder, ("sdpo", "dpo"), {"gradient_checkpointing": True}, **SHARDED),
        "projected": settings(folder, ("dpo",), from_direction=str(folder / "direction"), **SHARDED),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_shares_take_the_step_of_one_process(folder: Path, count: int) -> None:
    asked = cases(folder)
    alone = train_all(folder / f"one-{count}", asked, 1)
    together = train_all(folder / f"shares-{count}", asked, count)
    assert compare(together, alone) == {}
    for name, run in together.items():
        model, config = (run.folder(CHECKPOINT) / file for file in ("model.safetensors", "config.json"))
        assert config.read_bytes() == (alone[name].folder(CHECKPOINT) / "config.json").read_bytes()
        assert load_file(model).keys() == load_file(alone[name].folder(CHECKPOINT) / "model.safetensors").keys()
    kept = [
        run.path / "checkpoints" / "step_000001" / "model.safetensors" for run in (together["plain"], alone["plain"])
    ]
    accounts = [store.read_json(run["projected"].path / "projection.json") for run in (together, alone)]
    for ours, theirs in zip(*accounts, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5) and ours["energy_removed_update"] > 0
    ours, theirs = map(load_file, kept)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_that_are_not_dealt_and_sixteen_bits(folder: Path) -> None:
    """What breaks the shares' denominators is seen; bfloat16 weights are trained as float32 masters, here as there."""
    tiny = save_tiny(folder / "half")
    Qwen3ForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tiny)
    half = {"policy": {"model": str(tiny), "max_tokens": 10}}
    asked = {
        "broken": settings(folder, tuple(CHANNELS), **SHARDED) | {"broken": "OwnDenominators"},
        "half": settings(folder, ("dpo",), **half, **SHARDED),
        "whole": settings(folder, ("dpo",), **half),
    }
    together = train_all(folder / "odd", asked, 2)
    alone = train_all(folder / "even", {"broken": settings(folder, tuple(CHANNELS))}, 1)
    assert weights_apart(together["broken"], alone["broken"]) > 1e-4
    trained = load_file(together["half"].folder(CHECKPOINT) / "model.safetensors")
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert 0 < weights_apart(together["half"], together["whole"]) < 0.02


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_training_goes_on_in_shares_or_whole(folder: Path) -> None:
    """AdamW's moments go along; its epsilon is large, so that moments of nearly 0 do not decide a step's sign."""
    case = settings(
        folder,
        ("taid",),
        {"steps": 6, "save_every": 2, "learning_rate": 0.01},
        env={"name": "support.environments:SlowEnv"},
        trl={"adam_epsilon": 1e-2},
    )
    whole = train_all(folder / "uninterrupted", {"run": case}, 1)
    for first, then in ((2, 1), (1, 2)):
        place = folder / f"{first}-{then}"
        running = at_a_checkpoint(place, {**case, **SHARDED}, first)
        for process in running:
            process.kill()
        for process in running:
            process.communicate(timeout=60)
        resumed = train_all(place, {"run": {**case, **SHARDED}}, then)
        assert resumed["run"].manifest.attempts == 2
        assert compare(resumed, whole) == {}


def test_how_it_is_spread_is_no_part_of_what_is_trained() -> None:
    assert Config(**SHARDED).identity() == Config().identity()


def test_shares_take_less_memory() -> None:
    """Seven billion parameters in bfloat16 on eight: 2 bytes for all of them, and 16 eighths."""
    linears = ((10_000, 20_000),) * 28
    shape = ModelShape(
        parameters=7_000_000_000, bytes=2, layers=28, hidden=3584, kv=512, vocabulary=152_064, linears=linears
    )
    size = {"micro_batch": 1, "gradient_checkpointing": True}
    training = TrainPlan(Config(optimisation=size, adapter={"rank": 0}), shape, small=False, episode=1024, processes=8)
    sharded = training.changed(distribution={"sharding": "fsdp2"})
    whole, shared = estimate_memory(training), estimate_memory(sharded)
    assert (whole.weights, whole.gradients, whole.optimiser) == (42e9, 28e9, 56e9)
    assert (shared.weights, shared.optimiser) == (17.5e9, 7e9)
    uncut, on_their_way = 2 * (7e9 - 27 * 2e8), 4 * (7e9 - 28 * 2e8)  # the embeddings' and one layer's; the former's
    assert shared.gradients == 3.5e9 + uncut + on_their_way
    assert estimate_memory(sharded.changed(optimisation={"shared_prompts": True})).gradients == 17.5e9 + on_their_way
    with pytest.raises(UsageError, match=r"One after the other: distribution.sharding=fsdp2 \(\d+"):
        check_memory(training, Room(round(shared.total)))
