"""What is trained of a Linear: its row gradients, and what a measurement of rollouts leaves as it was."""

import copy

import peft
import pytest
import torch
from probe_faults.loophole_world import tiny_qwen3
from support.refusals import refused
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from composer_stages.errors import UsageError
from composer_stages.gradients.basis import layer_linears
from composer_stages.gradients.per_row import TokenRow
from composer_stages.training.projection import random_like
from composer_stages.training.rollout_gradients import measure_rollouts, ratio_report
from composer_stages.training.trained import train_singular_values, trained_linears


def rows() -> list[TokenRow]:
    """Rows of different lengths, with a token between that is not the policy's."""
    ids = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return [TokenRow(row[:4], row[4 : 8 + i], [True, True, False, *[True] * (1 + i)]) for i, row in enumerate(ids)]


def model_with(kind: str) -> torch.nn.Module:
    """A tiny model that trains its weights, a LoRA away from its start, or singular values away from theirs."""
    model = tiny_qwen3()
    torch.manual_seed(1)
    if kind == "lora":
        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).get_base_model()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if kind == "singular-values":
        train_singular_values(model)
        for name, parameter in model.named_parameters():
            if name.endswith(".change"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", ["weights", "lora", "singular-values"])
def test_each_rollouts_gradient_is_that_of_a_pass_of_its_own(kind: str) -> None:
    model = model_with(kind)
    shapes = {name: torch.zeros_like(linear.weight) for name, linear in layer_linears(tiny_qwen3())}
    toward = random_like({name: part.detach() for name, part in shapes.items()}, 0)
    before, flags = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    found = measure_rollouts(model, toward, rows(), max_tokens=32)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    linears = trained_linears(model, toward)
    assert len(linears) == 14
    for row, cosine, norm, own in zip(rows(), found.cosines, found.norms, found.log_probs, strict=True):
        model.zero_grad()
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        logps = model(input_ids=ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
        assert torch.allclose(logps[torch.tensor(row.own)].detach(), own, atol=1e-5)
        (-logps[torch.tensor(row.own)].sum()).backward()
        parts: list[tuple[Tensor, Tensor]] = []
        for name, linear in linears.items():
            slope = torch.cat([s.detach().flatten() for s in linear.slopes(toward[name])])
            parts.append((torch.cat([g.flatten() for g in linear.gradients()]), slope / slope.norm()))
        whole, unit = (torch.cat(side) for side in zip(*parts, strict=True))
        assert float(norm) == pytest.approx(float(whole.norm()), rel=1e-4)
        assert float(cosine) == pytest.approx(float(torch.cosine_similarity(whole, unit, dim=0)), abs=1e-5)


def test_an_unchanged_start_computes_what_it_did_bit_for_bit() -> None:
    model, ids = tiny_qwen3(), torch.arange(2, 26).view(2, 12)
    expected = model(ids).logits
    train_singular_values(model)
    assert torch.equal(model(ids).logits, expected)
    assert sum(p.requires_grad for p in model.parameters()) == 14


@pytest.mark.parametrize("kind", ["lora", "singular-values"])
def test_the_change_of_the_weights_has_the_norm_that_is_stated(kind: str) -> None:
    model, plain = model_with(kind), tiny_qwen3()
    names = [name for name, _ in layer_linears(plain)]
    stated = torch.stack([linear.squared_change() for linear in trained_linears(model, names).values()]).sum().detach()
    changed = 0.0
    for name in names:
        module = model.get_submodule(name)
        weight = module.folded() if kind == "singular-values" else module.weight + module.get_delta_weight("default")
        changed += float((weight - plain.get_submodule(name).weight).square().sum().detach())
    assert float(stated) == pytest.approx(changed, rel=1e-4)


def test_clipped_tokens_are_counted() -> None:
    draw = torch.Generator().manual_seed(0)
    logps = [-torch.rand(length, generator=draw) for length in (4, 5, 6, 7)]
    far = [logps[0] - 1.0, logps[1] + 1.0, logps[2] + 3.0, logps[3]]  # rho 2.7, .37, .05, 1
    report = ratio_report(logps, far, [1.0, -1.0, 1.0, 1.0])
    assert (report.clip_high, report.clip_low, report.vanish) == pytest.approx((4 / 22, 5 / 22, 6 / 22))
    assert report.saturated is not None and "clipped or vanish" in report.saturated
    assert ratio_report(logps, logps, [1.0, -1.0, 1.0, 1.0]).saturated is None


def test_few_rollouts_with_all_the_weight_are_saturation_too() -> None:
    logps = [torch.full((5,), -1.0) for _ in range(10)]
    behaviour = [torch.full((5,), -1.2 if i == 0 else -1.0) for i in range(10)]
    assert ratio_report(logps, behaviour, [0.0] * 10).saturated is None
    behaviour[0] = torch.full((5,), -9.0)
    assert "effective sample size" in (ratio_report(logps, behaviour, [0.0] * 10).saturated or "")


def test_a_model_without_such_linears_is_refused_before_it_trains_nothing() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4))
    refused(
        lambda: train_singular_values(model), UsageError, code="training.no-singular-values", kind="GPT2LMHeadModel"
    )
