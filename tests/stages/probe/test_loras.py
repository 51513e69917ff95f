"""A LoRA teacher: merged as PEFT does it, or beside weights that cannot hold it."""

from pathlib import Path

import peft
import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.errors import BadInput
from composer_stages.gradients.basis import target_linears
from composer_stages.probe.checks.pool import merge_is_sound
from composer_stages.probe.loras import apply_lora, lora_folder
from composer_stages.probe.settings import SourceConfig


def saved_lora(folder: Path, size: float) -> peft.PeftModel:
    """The tiny model with a LoRA whose matrices B have normal entries of this size; the LoRA is in the folder too."""
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny_qwen3(), settings)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=size)
    adapted.save_pretrained(folder)
    return adapted


def test_a_merged_lora_is_that_of_peft(tmp_path: Path) -> None:
    model, ids = tiny_qwen3(), torch.arange(2, 26).view(2, 12)
    adapted = saved_lora(tmp_path, 0.1)
    report = apply_lora(model, tmp_path)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, adapted.eval()(ids).logits, atol=1e-4)
    assert report["merged"] and merge_is_sound(report, len(target_linears(model))).status == "PASS"
    assert merge_is_sound({**report, "delta_norms": {}}, 14).status == "FAIL"


def test_a_lora_too_small_for_the_weights_type_stays_beside_them(tmp_path: Path) -> None:
    saved_lora(tmp_path, 1e-5)
    model, untouched = tiny_qwen3(dtype=torch.bfloat16), tiny_qwen3(dtype=torch.bfloat16)
    report = apply_lora(model, tmp_path)
    assert not report["merged"] and max(report["rounding_losses"].values()) > 0.3
    for name, linear in target_linears(model).items():
        assert torch.equal(linear.weight, target_linears(untouched)[name].weight) and "forward" in vars(linear)
    assert merge_is_sound(report, 14).status == "PASS"


def test_loras_are_resolved_from_folders_the_hub_and_its_cache(tmp_path: Path) -> None:
    """Nobody listens at the endpoint: what was fetched before is used, and what was not is refused."""
    folder = tmp_path / "folder"
    folder.mkdir()
    assert lora_folder(str(folder)) == (folder, None)
    fetched = tmp_path / "cache/models--someone--lora"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (fetched / "snapshots" / commit).mkdir(parents=True)
    (fetched / "snapshots" / commit / "adapter_config.json").write_text("{}")
    (fetched / "refs").mkdir()
    (fetched / "refs/main").write_text(commit)
    nobody = {"endpoint": "http://127.0.0.1:9", "cache": tmp_path / "cache"}
    found, of = lora_folder("someone/lora", **nobody)
    assert found == fetched / "snapshots" / commit and of == commit
    with pytest.raises(BadInput, match="'someone/else' is neither a folder nor a model on the hub"):
        lora_folder("someone/else", **nobody)


def test_the_lora_is_part_of_the_identity_of_a_source(tmp_path: Path) -> None:
    """By the bytes in its folder, not by its path."""

    def identity(lora: str) -> dict[str, object]:
        return SourceConfig(name="teacher", policy={"model": "kata:honest"}, lora=lora).identity()

    (tmp_path / "adapter_config.json").write_text("{}")
    before = identity(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    assert identity(str(tmp_path)) != before and "lora_content" not in identity("")
