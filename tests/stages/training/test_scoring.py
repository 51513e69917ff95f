"""Trees of prompts and branches score as separate rows do, packed or row by row, on every kind of model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from composer_stages.gradients.per_row import by_length
from composer_stages.training import packing
from composer_stages.training.channels.rollouts import OwnRollout
from composer_stages.training.scoring import Tree, logits, predictors, score, score_together, token_log_probs
from composer_stages.training.step import row_lengths, rows_in_batch, rows_of, share, split_until
from tests.stages.training.flash import flash_on_cpu

TREES = [
    Tree([5, 6, 7, 8], ([9, 10, 11], [12, 13])),
    Tree([20, 21], ([22], [23, 24, 25, 26], [27, 28])),
    Tree(list(range(30, 60)), ([61, 62],)),
]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def separate(model: torch.nn.Module, prompt: list[int], branch: list[int]) -> torch.Tensor:
    """Log-probs of a branch from a row of its own."""
    logits = model(input_ids=torch.tensor([prompt + branch])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(branch)[:, None])[:, 0]


def test_gradients_are_those_of_separate_rows() -> None:
    model = tiny_model().double()
    weights = torch.randn(sum(len(b) for t in TREES for b in t.branches), dtype=torch.float64)
    (token_log_probs(model, score(model, TREES)).double() * weights).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    rows = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
    (rows * weights).sum().backward()
    # Log-probs are float32, and gradients sums of terms up to 22: where those cancel, some eps of them are left.
    for a, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-5)


def test_shared_rows_are_scored_once_with_equal_results() -> None:
    """A group of GRPO's, the same rollouts as rollouts of their own, and a turn behind the same prompt."""
    model, group = tiny_model().double(), TREES[1]
    rollouts = [Tree(list(group.prompt), (list(branch),)) for branch in (*group.branches, group.branches[1])]
    parts = [TREES, rollouts, [Tree(list(group.prompt), ([29],))], []]
    computed: list[int] = []
    watch = model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    together = score_together(model, parts)
    once, _ = sum(computed), computed.clear()
    score(model, [tree for part in parts for tree in part])
    watch.remove()
    assert once < 0.8 * sum(computed)
    weights = [torch.rand(len(scored.targets), dtype=torch.float64) for scored in together]
    for part, found in zip(parts[:-1], together, strict=False):
        apart = score(model, part)
        torch.testing.assert_close(found.hidden, apart.hidden, rtol=1e-10, atol=1e-10)
        assert torch.equal(found.targets, apart.targets) and torch.equal(found.branch, apart.branch)
        assert found.num_branches == apart.num_branches
    assert len(together[-1].hidden) == together[-1].num_branches == 0

    def gradient(scores: list[Any]) -> torch.Tensor:
        pairs = zip(scores, weights, strict=False)
        loss = sum(((token_log_probs(model, scored) * weight).sum() for scored, weight in pairs), torch.zeros(()))
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    apart = gradient([score(model, part) for part in parts[:-1]])
    torch.testing.assert_close(gradient(together[:-1]), apart, rtol=1e-5, atol=1e-5)


def test_sums_and_lengths_by_branch() -> None:
    scored = score(tiny_model(), TREES)
    ones = torch.ones(len(scored.targets))
    assert scored.per_branch(ones).tolist() == scored.lengths.tolist() == [3, 2, 1, 4, 2, 2]


def test_branches_of_one_token_need_nothing_but_their_prompt() -> None:
    model = tiny_model().double()
    trees = [Tree([5, 6, 7], ([8], [9])), Tree([5, 6], ([8], [10]))]
    expected = torch.cat([separate(model, tree.prompt, branch) for tree in trees for branch in tree.branches])
    torch.testing.assert_close(token_log_probs(model, score(model, trees)).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_a_head_that_is_unknown_gives_its_own_logits(multiplier: float) -> None:
    given = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    model = made(FalconH1Config(**GROUPED, **given, lm_head_multiplier=multiplier)).requires_grad_()
    scored = score(model, TREES)
    assert scored.are_logits == (multiplier != 1)
    expected = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
    torch.testing.assert_close(token_log_probs(model, scored), expected, rtol=1e-5, atol=1e-5)
    assert predictors(model, scored).logits(scored.hidden).shape == (len(expected), 96)


# Packed: one row without padding for all trees

SPREAD = {**SIZES, "initializer_range": 0.5}
"""Random weights that are far from equal, so that a wrong position shows."""
SHARING = {**SPREAD, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FULL, SLIDING = "full_attention", "sliding_attention"
PACKED = {
    "Llama": LlamaConfig(**SHARING),
    "Llama, tied, no pad token": LlamaConfig(**SHARING | {"pad_token_id": None}, tie_word_embeddings=True),
    "Qwen2": Qwen2Config(**SHARING),
    "Qwen3": Qwen3Config(**SHARING, head_dim=8),
    "Qwen3-MoE": Qwen3MoeConfig(**SHARING, **EXPERTS),
    "Gemma-3": Gemma3TextConfig(**SHARING, head_dim=8, sliding_window=64, layer_types=[SLIDING, FULL]),
    "Mistral": MistralConfig(**SHARING, sliding_window=64),
    "Phi-3": Phi3Config(**SHARING, partial_rotary_factor=0.5),
    "OLMo-2": Olmo2Config(**SHARING),
    "SmolLM3": SmolLM3Config(**SHARING, no_rope_layers=[1, 0]),
    "GPT-NeoX": GPTNeoXConfig(**SPREAD),
    "Granite": GraniteConfig(**SHARING, logits_scaling=4.0),
    "Cohere": CohereConfig(**SHARING, logit_scale=0.25),
    "OPT": OPTConfig(**SPREAD, ffn_dim=48, word_embed_proj_dim=32),
}
BY_ROWS = {
    "Mistral, a window that is shorter than a row": MistralConfig(**SHARING, sliding_window=5),
    "Gemma-3, windows in some layers": Gemma3TextConfig(
        **SHARING, head_dim=8, sliding_window=5, layer_types=[SLIDING, FULL]
    ),
    "Gemma-2, soft caps, which sdpa has not": Gemma2Config(
        **SHARING, head_dim=8, sliding_window=5, attn_logit_softcapping=0.5, final_logit_softcapping=2.0
    ),
    "GPT-OSS, sinks, which sdpa has not": GptOssConfig(
        **SHARING, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "Mamba, a recurrent state": MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, initializer_range=0.5, tie_word_embeddings=False
    ),
    "LFM2, convolutions": Lfm2Config(**SHARING, layer_types=["conv", FULL]),
}
ARCHITECTURES = {**PACKED, **BY_ROWS}


def made(config: Any) -> Any:
    """A model as transformers makes it from its configuration, with the attention that it chooses."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()


def watched(model: Any) -> list[tuple[int, ...]]:
    """The shapes of what its decoder is given from now on."""
    shapes: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, told: shapes.append(tuple(told["input_ids"].shape)), with_kwargs=True
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


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_log_probs_are_those_of_transformers_own_pass(kind: str) -> None:
    """Packed into one row where the architecture allows it. In float64, to the float32 of Mamba's logits."""
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-6)):
        model = made(ARCHITECTURES[kind]).to(dtype)
        expected = torch.cat([separate(model, tree.prompt, branch) for tree in TREES for branch in tree.branches])
        assert expected.std() > 0.5, "random weights that tell one token from another"
        shapes = watched(model)
        scored = score(model, TREES)
        of_table = torch.log_softmax(logits(model, scored), -1).gather(-1, scored.targets[:, None])[:, 0]
        for found in (token_log_probs(model, scored), of_table):
            torch.testing.assert_close(found, expected, rtol=most, atol=most, check_dtype=False)
        row = (1, (4 + 2 + 1) + (2 + 0 + 3 + 1) + (30 + 1))
        assert shapes == [row] if kind in PACKED else all(rows > 1 or width < 40 for rows, width in shapes)


class Deaf(torch.nn.Module):
    """A layer that keeps what it is told to itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, packed: Any = None, **given: Any) -> Any:
        return self.layer(*args, **given)


def test_models_that_drop_the_packed_argument_are_scored_separately() -> None:
    model = tiny_model().double()
    expected = by_rows(model)
    model.model.layers[1] = Deaf(model.model.layers[1])
    shapes = watched(model)
    for _ in range(2):
        torch.testing.assert_close(score(model, TREES).hidden, expected, rtol=1e-9, atol=1e-9)
    assert sum(rows == 1 and width > 40 for rows, width in shapes) == 1  # tried once


def test_rows_behind_the_context_of_a_dynamic_rope_are_scored_by_their_own_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = made(LlamaConfig(**GROUPED, max_position_embeddings=48, rope_parameters=rope))
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4)
    trees = [Tree(list(range(5, 65)), (list(range(20, 45)), [20, 21])), Tree(list(range(7, 17)), ([30, 31, 32],))]
    apart = []
    for tree in trees:
        for branch in tree.branches:
            separate(model, [5], [6])  # the model then forgets the frequencies of the longer row before
            apart.append(separate(model, tree.prompt, branch))
    assert torch.allclose(token_log_probs(model, score(model, trees)), torch.cat(apart), atol=1e-4)


def test_packed_bfloat16_is_as_accurate_as_separate_rows() -> None:
    model = tiny_model()
    truth = by_rows(model)
    rough = model.to(torch.bfloat16)
    separate, packed = ((found.float() - truth).norm() for found in (by_rows(rough), score(rough, TREES).hidden))
    assert 0 < packed < 1.2 * separate


@pytest.mark.parametrize("most", [1, 7, 12, 40, 1000])
def test_log_probs_are_independent_of_the_token_budget(most: int) -> None:
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


def test_packing_leaves_generation_and_saving_unchanged(tmp_path: Any) -> None:
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
    groups = by_length([10, 3, 4, 15, 16, 2], 500, lambda length: length**2, packing.ALIKE)
    assert groups == [[5, 1], [2], [0, 3], [4]]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_one_call_for_segments_of_any_length_attends_as_blocks_do(heads: tuple[int, int]) -> None:
    families = [(tree.prompt, tree.branches) for tree in TREES]
    *_, segments = packing.laid_out(families)
    size = sum(one.length for one in segments)
    made = torch.Generator().manual_seed(0)
    numbers = [torch.randn(1, n, size, 8, dtype=torch.float64, generator=made) for n in (heads[0], heads[1], heads[1])]
    options = {"dropout": 0.0, "scaling": 0.3}
    module = SimpleNamespace(training=True, is_causal=True, num_key_value_groups=heads[0] // heads[1])
    found = []
    with flash_on_cpu() as calls:
        for lay_out in (packing.padded, packing.ragged):
            states = [one.clone().requires_grad_() for one in numbers]
            _, layout = lay_out(segments, (), torch.device("cpu"), torch.float64)
            attended = layout.attend(module, *states, **options)
            weighted = attended * torch.arange(attended.numel(), dtype=torch.float64).view_as(attended)
            found.append([attended, *torch.autograd.grad(weighted.sum(), states)])
    assert calls == [(31, 31)]  # the prompt of 30 tokens with its one branch
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


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


def test_training_does_without_cudnns_attention() -> None:
    """Its gradients are NaN where scores are large, which only a GPU shows: `./dev gpu correctness`."""
    assert packing.NAME and not torch.backends.cuda.cudnn_sdp_enabled()


def test_flash_attention_that_gives_other_numbers_is_not_taken() -> None:
    shape = (torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    assert not packing.flash_agrees(*shape)  # torch has none for a CPU
    with flash_on_cpu():
        assert packing.flash_agrees(*shape)
        assert not packing.flash_agrees(torch.device("cpu"), torch.float32, 4, 2, 8)
    with flash_on_cpu(shift=1):
        assert not packing.flash_agrees(*shape)


# Rows of a batch: parts cut to their own length add up to the batch


def test_rows_are_cut_to_the_longest_among_them() -> None:
    inputs = {
        "prompt_ids": torch.tensor([[0, 1, 2], [3, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[1, 0, 0, 0], [3, 3, 3, 3]]),
        "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]),
        "tool_mask": torch.ones(2, 4),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(5),
    }
    part = rows_of(inputs, [0])
    assert row_lengths(inputs) == [3, 7]
    assert part["prompt_ids"].tolist() == [[1, 2]] and part["completion_ids"].tolist() == [[1]]
    assert part["tool_mask"].shape == (1, 1) and part["advantages"].tolist() == [0.5]
    assert part["num_items_in_batch"] == 5
    assert share("dapo", part, inputs) == 1.0 and share("grpo", part, inputs) == 0.5
    assert share("bnpo", part, inputs) == 0.2
    masked = rows_of(inputs | {"completion_mask": torch.zeros(2, 4, dtype=torch.long)}, [0])
    assert masked["completion_ids"].tolist() == [[1]] and masked["completion_mask"].tolist() == [[0]]


def test_each_batch_takes_the_rows_of_its_own_rollouts_and_the_last_one_what_is_left() -> None:
    """Two rollouts that are equal count as two; one that is in no batch, which TRL cut short, goes along at last."""
    rows = [OwnRollout(Tree([1, 2], (ids,)), [1] * len(ids), []) for ids in ([5], [6, 7], [5], [8, 9, 9])]
    batches = [[[6, 7], [5]], [[8, 9], [5]]]
    left, found = list(rows), []
    for number, completions in enumerate(batches):
        inputs = {
            "prompt_ids": torch.tensor([[0, 1, 2]] * 2),
            "prompt_mask": torch.tensor([[0, 1, 1]] * 2),
            "completion_ids": torch.tensor([[*ids, 0][:2] for ids in completions]),
            "completion_mask": torch.tensor([[1] * len(ids) + [0] * (2 - len(ids)) for ids in completions]),
        }
        found.append(rows_in_batch(left, inputs, all_left=number == 1))
    assert found == [[rows[0], rows[1]], [rows[2], rows[3]]] and left == []


def test_parts_are_halved_until_there_are_enough() -> None:
    assert split_until([[0, 1, 2, 3, 4], [5]], 2) == [[0, 1, 2, 3, 4], [5]]
    assert split_until([[0, 1, 2, 3, 4], [5]], 4) == [[0, 1], [2], [3, 4], [5]]
    assert split_until([[0, 1, 2]], 3) == [[0], [1], [2]]
