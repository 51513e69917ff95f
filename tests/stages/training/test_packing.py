"""Packed rows score as rows of their own, on every kind of model; what cannot be packed is scored row by row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import trees
from support.flash import flash_on_cpu
from support.models import tiny_model
from support.trees import TREES
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stages.training import packing
from stages.training.scoring import score, token_log_probs

SIZES = {**trees.SIZES, "initializer_range": 0.5}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
PACKED = {
    "Qwen2": Qwen2Config(**GROUPED),
    "Qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "Qwen3 MoE": Qwen3MoeConfig(**GROUPED, **EXPERTS),
    "Llama": LlamaConfig(**GROUPED),
    "Mistral": MistralConfig(**GROUPED, sliding_window=64),
    "Gemma 3": Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=64),
    "Phi 3": Phi3Config(**GROUPED),
    "GPT-NeoX": GPTNeoXConfig(**SIZES),
    "Granite": GraniteConfig(**GROUPED),
    "Cohere": CohereConfig(**GROUPED),
    "OPT": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}
BY_ROWS = {
    "a window that is shorter than a row": MistralConfig(**GROUPED, sliding_window=5),
    "windows in some layers": Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=5),
    "a recurrent state": MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, initializer_range=0.5),
    "convolutions": Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "sinks, which sdpa has not": GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "a soft cap, which sdpa has not": Gemma2Config(**GROUPED, head_dim=8),
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()


def watched(model: Any) -> list[tuple[int, ...]]:
    """The shapes of what its decoder is given from now on."""
    shapes: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def by_rows(model: Any) -> torch.Tensor:
    """[N, H] of rows that are given to the model one by one."""
    rows = [(tree.prompt, branch) for tree in TREES for branch in tree.branches]
    states = [
        model.get_decoder()(input_ids=torch.tensor([prompt + branch[:-1]]), use_cache=False).last_hidden_state[0]
        for prompt, branch in rows
    ]
    return torch.cat([one[len(prompt) - 1 :] for one, (prompt, _) in zip(states, rows, strict=True)])


@pytest.mark.parametrize("kind", PACKED)
def test_one_row_without_padding_scores_as_separate_rows(kind: str) -> None:
    model = made(PACKED[kind])
    expected, shapes = by_rows(model), watched(model)
    torch.testing.assert_close(score(model, TREES).hidden, expected, rtol=1e-9, atol=1e-9)
    assert shapes == [(1, (4 + 2 + 1) + (2 + 0 + 3 + 1) + (30 + 1))]


@pytest.mark.parametrize("kind", BY_ROWS)
def test_what_cannot_be_packed_is_scored_row_by_row(kind: str) -> None:
    model = made(BY_ROWS[kind])
    expected, shapes = by_rows(model), watched(model)
    torch.testing.assert_close(score(model, TREES).hidden, expected, rtol=1e-9, atol=1e-9)
    assert all(rows > 1 or width < 40 for rows, width in shapes)


class Deaf(torch.nn.Module):
    """A layer that keeps what it is told to itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, packed: Any = None, **given: Any) -> Any:
        return self.layer(*args, **given)


def test_a_model_that_does_not_pass_words_on_is_found_out() -> None:
    model = tiny_model().double()
    expected = by_rows(model)
    model.model.layers[1] = Deaf(model.model.layers[1])
    shapes = watched(model)
    for _ in range(2):
        torch.testing.assert_close(score(model, TREES).hidden, expected, rtol=1e-9, atol=1e-9)
    assert sum(rows == 1 and width > 40 for rows, width in shapes) == 1  # tried once


def test_in_sixteen_bits_it_is_as_near_to_the_truth_as_separate_rows() -> None:
    model = tiny_model()
    truth = by_rows(model)
    rough = model.to(torch.bfloat16)
    separate, packed = ((found.float() - truth).norm() for found in (by_rows(rough), score(rough, TREES).hidden))
    assert 0 < packed < 1.2 * separate


@pytest.mark.parametrize("most", [1, 7, 12, 40, 1000])
def test_however_passes_are_cut_the_numbers_stay(most: int) -> None:
    model = tiny_model().double()
    expected, shapes = by_rows(model), watched(model)
    found = packing.predicting(model, [(tree.prompt, tree.branches) for tree in TREES], most)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert all(width <= max(most, 31) for _, width in shapes) and (len(shapes) > 1) == (most < 1000)


def test_recomputed_activations_share_prompts_too() -> None:
    model = tiny_model().double().train()
    weights = torch.randn(14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient() -> list[torch.Tensor]:
        loss = (token_log_probs(model, score(model, TREES)) * weights).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    kept = gradient()
    model.gradient_checkpointing_enable()
    shapes = watched(model)
    for ours, theirs in zip(gradient(), kept, strict=True):
        assert torch.equal(ours, theirs)
    assert shapes == [(1, 44)]


def test_everything_else_of_the_model_is_as_it_was(tmp_path: Any) -> None:
    model = tiny_model()
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (ids > 0).long()

    def seen() -> list[torch.Tensor]:
        written = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        return [model(input_ids=ids, attention_mask=mask).logits, model(input_ids=ids).logits, written]

    before = seen()
    score(model, TREES)
    assert model.config._attn_implementation == packing.NAME
    assert all(torch.equal(old, new) for old, new in zip(before, seen(), strict=True))
    model.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()


def test_segments_of_like_length_attend_together() -> None:
    groups = packing.by_length([10, 3, 4, 15, 16, 2], lambda length: length, lambda length: length**2, 500)
    assert groups == [[2, 3], [4], [10, 15], [16]]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_one_call_for_segments_of_any_length_attends_as_blocks_do(heads: tuple[int, int]) -> None:
    families = [(tree.prompt, tree.branches) for tree in TREES]
    *_, segments = packing.laid_out(families)
    size = sum(one.length for one in segments)
    made = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1, n, size, 8, dtype=torch.float64, generator=made) for n in (heads[0], heads[1], heads[1])]
    given = {"dropout": 0.0, "scaling": 0.3}
    module = SimpleNamespace(training=True, is_causal=True, num_key_value_groups=heads[0] // heads[1])
    found = []
    with flash_on_cpu() as calls:
        for lay_out in (packing.padded, packing.ragged):
            states = [one.clone().requires_grad_() for one in numbers]
            _, layout = lay_out(segments, (), torch.device("cpu"), torch.float64)
            attended = layout.attend(module, *states, **given)
            weighted = attended * torch.arange(attended.numel(), dtype=torch.float64).view_as(attended)
            found.append([attended, *torch.autograd.grad(weighted.sum(), states)])
    assert calls == [(31, 31)]  # the prompt of 30 tokens with its one branch
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_flash_attention_is_taken_where_torch_has_it_and_is_as_near_to_the_truth() -> None:
    def scored(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = score(model, TREES).hidden.float()
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad((hidden * weights).sum(), list(model.parameters()), allow_unused=True)
        return hidden, torch.cat([one.float().flatten() for one in gradients if one is not None])

    truth, model = scored(tiny_model()), tiny_model().to(torch.bfloat16)
    before = scored(model)
    with flash_on_cpu() as calls:
        after = scored(model)
    layers = model.config.num_hidden_layers
    assert calls[-layers:] == [(31, 31)] * layers and len(calls) == layers + 1  # it was tried once
    for ours, theirs, true in zip(after, before, truth, strict=True):
        assert 0 < (ours - true).norm() < 1.1 * (theirs - true).norm()


def test_flash_attention_that_gives_other_numbers_is_not_taken() -> None:
    shape = (torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    assert not packing.flash_agrees(*shape)  # torch has none for a CPU
    with flash_on_cpu():
        assert packing.flash_agrees(*shape)
        assert not packing.flash_agrees(torch.device("cpu"), torch.float32, 4, 2, 8)
    with flash_on_cpu(shift=1):
        assert not packing.flash_agrees(*shape)
