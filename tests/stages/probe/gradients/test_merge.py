"""A LoRA teacher: merged as PEFT does it, or beside weights that cannot hold it."""

from pathlib import Path

import pytest
import torch

from stages.probe.adapters.targets import target_linears
from stages.probe.checks.guards.teacher import merge_is_sound
from stages.probe.gradients.merge import apply_lora
from stages.probe.gradients.tiny import tiny_qwen3


def test_a_merged_lora_is_that_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny_qwen3(), torch.arange(2, 26).view(2, 12)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny_qwen3(), settings)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path)
    report = apply_lora(model, tmp_path)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, adapted.eval()(ids).logits, atol=1e-4)
    assert report["merged"] and merge_is_sound(report, len(target_linears(model))).status == "PASS"
    assert merge_is_sound({**report, "delta_norms": {}}, 14).status == "FAIL"


def test_a_lora_too_small_for_the_weights_type_stays_beside_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny_qwen3(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 1e-5)
    adapted.save_pretrained(tmp_path)
    model, untouched = tiny_qwen3(dtype=torch.bfloat16), tiny_qwen3(dtype=torch.bfloat16)
    report = apply_lora(model, tmp_path)
    assert not report["merged"] and max(report["rounding_losses"].values()) > 0.3
    for name, linear in target_linears(model).items():
        assert torch.equal(linear.weight, target_linears(untouched)[name].weight) and "forward" in vars(linear)
    assert merge_is_sound(report, 14).status == "PASS"
