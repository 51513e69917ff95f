"""Weights that learn do move: the share that one step at a small learning rate changes, in each mode."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_tiny
from support.trainings import trained
from transformers import AutoModelForCausalLM

from composer_stages.runs.kinds import CHECKPOINT

STEP = {"steps": 1, "learning_rate": 1e-6}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its weights in bfloat16."""
    folder = save_tiny(tmp_path_factory.mktemp("half"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def share_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Of the weights inside the layers; a token that never occurs has an embedding without gradient."""
    names = [name for name in before if ".layers." in name]
    moved = sum(int((before[name].to(after[name].dtype) != after[name]).sum()) for name in names)
    return moved / sum(before[name].numel() for name in names)


def test_full_training_moves_float32_masters(tmp_path: Path, half: Path) -> None:
    """Weights in bfloat16 would hardly move: such steps are below their spacing."""
    run = trained(tmp_path, half, optimisation=STEP, weights={"sdpo": 1.0})
    after = load_file(run.folder(CHECKPOINT) / "model.safetensors")
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert share_moved(load_file(half / "model.safetensors"), after) > 0.95


def test_adapters_move_in_float32_beside_a_base_that_stays(tmp_path: Path, half: Path) -> None:
    run = trained(tmp_path, half, optimisation=STEP, adapter={"rank": 4})
    first, after = (
        load_file(half / "model.safetensors"),
        load_file(run.folder(CHECKPOINT) / "adapter_model.safetensors"),
    )
    assert {weight.dtype for weight in first.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    learnt = [weight for name, weight in after.items() if "lora_B" in name]  # they begin at zero
    assert sum(int((w != 0).sum()) for w in learnt) / sum(w.numel() for w in learnt) > 0.95
