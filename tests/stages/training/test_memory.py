"""What a training takes is known from config.json alone, and what does not fit is refused with a way out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages import train
from stages.errors import UsageError
from stages.policy.base import PolicyConfig
from stages.runs import runner
from stages.runs.artifact import Inputs
from stages.training import plan
from stages.training.plan import GIB, KEPT, ModelShape, TrainPlan, model_shape, resolve

EIGHT = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
    dtype="bfloat16",
    architectures=["Qwen3ForCausalLM"],
)
"""The dimensions of Qwen3-8B."""


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a model of eight billion parameters, and nothing else."""
    folder = tmp_path_factory.mktemp("eight")
    EIGHT.save_pretrained(folder)
    return folder


def shape_of(folder: Path) -> ModelShape:
    shape = model_shape(PolicyConfig(model=str(folder)))
    assert shape is not None
    return shape


def planned(folder: Path, processes: int = 1, episode: int = 512, **settings: Any) -> TrainPlan:
    """The plan of a training of a model, with episodes of so many tokens."""
    resolved = resolve(train.Config(policy={"model": str(folder)}, **settings), processes)
    return replace(resolved, episode=episode)


def test_the_shape_is_that_of_the_model(tmp_path: Path, eight: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    found = shape_of(tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (found.bytes, found.layers, found.kv) == (4, 2, 16)
    assert shape_of(eight).parameters == 8_190_735_360  # as the model card of Qwen3-8B has it: 8.2 B
    assert shape_of(eight).bytes == 2


def test_what_a_layer_keeps_is_what_autograd_saves() -> None:
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    model, tokens = Qwen3ForCausalLM(config).to(torch.bfloat16).train(), 128
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    linears = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.Linear)]
    estimate = 2 * KEPT * tokens * sum(m.in_features + m.out_features for m in linears)
    assert 1.0 <= estimate / sum(t.untyped_storage().nbytes() for t in saved.values()) <= 1.2


def test_defaults_fit_eight_billion_on_one_accelerator_and_full_training_does_not(eight: Path) -> None:
    plan.check_memory(planned(eight), 80 * GIB)

    size = {"gradient_checkpointing": False, "micro_batch": 64}
    full = planned(eight, optimisation=size, adapter={"rank": 0})
    total = plan.estimate_memory(full)
    assert total.gradients == 4 * 8_190_735_360 and total.optimiser == 8 * 8_190_735_360
    words = (
        r"about .* GiB \(weights 45\.8, gradients 30\.5, optimiser 61\.0, activations .*\), and there are 30\.0 GiB\. "
        r".*optimisation\.gradient_checkpointing=true .*optimisation\.micro_batch=1 .*adapter\.rank=16 .* that fits"
    )
    with pytest.raises(UsageError, match=words):
        plan.check_memory(full, 30 * GIB)
    with pytest.raises(UsageError, match="still does not fit"):
        plan.check_memory(full, 8 * GIB)


def test_a_training_that_cannot_fit_is_refused_before_loading(tmp_path: Path) -> None:
    """The folder has no weights at all, so that loading would say something else."""
    changes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200}
    Qwen3Config(**{**EIGHT.to_dict(), **changes, "layer_types": None}).save_pretrained(tmp_path / "huge")
    config = train.Config(
        env={"name": "support.environments:GuessEnv"}, policy={"model": str(tmp_path / "huge")}, tasks=4
    )
    with pytest.raises(UsageError, match="This training takes about"):
        runner.execute("train", {}, config, root=tmp_path)


def test_the_plan_says_what_was_chosen_and_why(eight: Path) -> None:
    chosen, needed = train.plan(Inputs(), train.Config(policy={"model": str(eight)})).notes
    assert "LoRA of rank 16 at learning rate 1e-05, 8 rollouts a pass, activations recomputed" in chosen
    assert "8.2 B parameters" in chosen and "GiB (weights 15.4" in needed
    assert train.plan(Inputs(), train.Config()).notes == ()


def test_a_teacher_that_is_held_here_counts_and_one_behind_a_server_does_not(eight: Path) -> None:
    alone, beside, served = (
        planned(eight, teacher=teacher)
        for teacher in (
            None,
            {"model": str(eight)},
            {"model": f"vllm:{eight}", "base_url": "http://127.0.0.1:1/v1"},
        )
    )
    assert beside.teacher_bytes == 2 * 8_190_735_360 and alone.teacher_bytes == served.teacher_bytes == 0
    room = plan.estimate_memory(alone).total + GIB
    plan.check_memory(alone, int(room))
    with pytest.raises(UsageError, match=r"activations [\d.]+, teacher 15\.3\), and there are"):
        plan.check_memory(beside, int(room))


def test_processes_share_the_rollouts_and_nothing_else(eight: Path) -> None:
    one, many = (plan.estimate_memory(planned(eight, count, 8192, optimisation={"micro_batch": 1})) for count in (1, 8))
    assert many.activations < one.activations / 4
    assert (many.weights, many.gradients, many.optimiser) == (one.weights, one.gradients, one.optimiser)


def groups(root: Path, cgroup: str, **limits: str) -> Path:
    """A root whose proc and sys say this; `limits` are files below sys/fs/cgroup, `__` for a slash."""
    files = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{k.replace('__', '/')}": v for k, v in limits.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_control_group_s_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    two = groups(tmp_path / "2", "0::/a/job\n", **{"a__job__memory.max": "3000\n", "a__memory.max": "max\n"})
    assert plan.available("cpu", two) == 3000
    above = groups(tmp_path / "above", "0::/a/job\n", **{"a__job__memory.max": "3000\n", "a__memory.max": "2000\n"})
    assert plan.available("cpu", above) == 2000, "a group above it may allow less"
    one = "memory__a__memory.limit_in_bytes"
    first = groups(tmp_path / "1", "4:cpu,memory:/a\n0::/\n2:cpuset:/\n", **{one: "5000\n"})
    assert plan.available("cpu", first) == 5000
    inside = groups(tmp_path / "inside", "0::/of/the/host\n", **{"memory.max": "4000\n"})
    assert plan.available("cpu", inside) == 4000, "a container sees its own group as the root"


def test_without_a_limit_it_is_all_of_the_machine(tmp_path: Path) -> None:
    machine = plan.available("cpu", tmp_path / "no such system")
    endless = groups(tmp_path / "1", "4:memory:/a\n", **{"memory__a__memory.limit_in_bytes": "9223372036854771712\n"})
    free = groups(tmp_path / "2", "0::/a\n", **{"a__memory.max": "max\n"})
    assert plan.available("cpu", endless) == plan.available("cpu", free) == machine > 2**30


def test_a_training_that_a_container_cannot_hold_is_refused(tmp_path: Path, eight: Path) -> None:
    room = plan.available("cpu", groups(tmp_path, "0::/\n", **{"memory.max": str(4 * GIB)}))
    with pytest.raises(UsageError, match=r"and there are 4\.0 GiB"):
        plan.check_memory(planned(eight, episode=100, optimisation={"micro_batch": 1}), room)
