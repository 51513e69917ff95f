"""Every architecture samples and scores by its own numbers, whichever ways are found right for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3MoeConfig,
)

from composer_stages.policy import small_models, trials
from composer_stages.policy.sampling import ALONE, BATCHED, IN_PLACE, sample_batch, try_sampling
from composer_stages.training.scoring import PADDED, Tree, score, token_log_probs, try_scoring

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
CONTEXT = 32
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 9.0, 16.0], "factor": 8.0}
LONG |= {"rope_theta": 10000.0, "original_max_position_embeddings": CONTEXT}


def llama(**rope: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters={"rope_theta": 10000.0, **rope})


PHI3 = Phi3Config(**SIZES, max_position_embeddings=256, original_max_position_embeddings=CONTEXT, rope_parameters=LONG)
STATES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.5}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "longrope": (PHI3, {IN_PLACE: "before", BATCHED: "before", ALONE: True}),
    "longrope, its context in the old place": (
        Phi3Config(
            **SIZES,
            max_position_embeddings=256,
            original_max_position_embeddings=CONTEXT,
            rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 9.0, 16.0]},
        ),
        {IN_PLACE: "before", BATCHED: "before", ALONE: True},
    ),
    "yarn": (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=CONTEXT), {IN_PLACE: "all"}),
    "llama3": (
        llama(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=CONTEXT,
        ),
        {IN_PLACE: "all"},
    ),
    "windows": (MistralConfig(**SIZES, sliding_window=20), {IN_PLACE: "before", BATCHED: "all"}),
    "experts": (
        Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
        {IN_PLACE: "all"},
    ),
    "no Linear": (GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3), {IN_PLACE: "all"}),
    "a recurrent state": (MambaConfig(**STATES), {IN_PLACE: None, ALONE: True}),
    "states and attention": (
        JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_dt_rank=4),
        {IN_PLACE: None},
    ),
    "sizes by layer": (
        AutoConfig.for_model(
            "gemma4_text",
            **SIZES | {"num_hidden_layers": 4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
        ),
        {},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_rows_alone_on_both_sides_of_every_switch(family: str) -> None:
    config, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ways = trials.outcome(model, try_sampling)
    assert ways.items() >= expected.items(), ways
    prompts = [[7, 8, 9], [11 + i % 60 for i in range(CONTEXT + 5)]]
    settings: dict[str, Any] = {"max_tokens": CONTEXT + 4, "temperature": 1.0, "end_ids": {2}, "pad_id": 0}
    rows = sample_batch(model, prompts, seeds=[1, 2], **settings)
    for prompt, seed, (ids, logps) in zip(prompts, (1, 2), rows, strict=True):
        alone = small_models.log_probs_alone(model, prompt, ids, range(len(ids)))
        torch.testing.assert_close(torch.tensor(logps), alone, rtol=1e-4, atol=1e-4)
        assert sample_batch(model, [prompt], seeds=[seed], **settings)[0][0] == ids, "the same row alone"
    trees = [Tree(prompt, (ids, ids[:3])) for prompt, (ids, _) in zip(prompts, rows, strict=True)]
    trees.append(Tree([7, 8, 9], ([20 + i for i in range(CONTEXT - 2)],)))  # a token more than the context
    with torch.no_grad():
        logits = [
            model(input_ids=torch.tensor([tree.prompt + branch]), use_cache=False).logits[0, len(tree.prompt) - 1 : -1]
            for tree in trees
            for branch in tree.branches
        ]
        scored = score(model, trees)
        right = torch.cat(logits).log_softmax(-1).gather(-1, scored.targets[:, None])[:, 0]
        torch.testing.assert_close(token_log_probs(model, scored), right, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_greedy_tokens_beyond_the_original_context_are_those_of_generate() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(PHI3).eval()
    prompt = list(range(3, 23))
    [(ids, _)] = sample_batch(model, [prompt], seeds=[5], max_tokens=30, temperature=0.0, end_ids={2}, pad_id=0)
    assert ids == model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, 20:].tolist()


def test_positions_that_count_padding_are_not_scored_in_padded_batches() -> None:
    config, _ = FAMILIES["no Linear"]
    model = AutoModelForCausalLM.from_config(config)
    assert trials.outcome(model, try_scoring)[PADDED] is None
    assert trials.outcome(tiny_model(), try_scoring)[PADDED] == "all"


def test_an_architecture_is_tried_once_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tiny_model().config
    calls = []

    def check(model: Any, switch: int) -> dict[str, Any]:
        calls.append((model.config.num_hidden_layers, switch))
        return {"tried": len(calls)}

    for _ in range(2):
        trials._known.clear()
        assert trials.outcome_of(config, check) == {"tried": 1}
    assert calls == [(2, 0)]
    [kept] = tmp_path.rglob("*.json")
    kept.write_text("{")
    trials._known.clear()
    assert trials.outcome_of(config, check) == {"tried": 2}, "a damaged record is none"


def test_an_architecture_that_is_not_made_small_is_computed_the_plain_way() -> None:
    model = tiny_model()
    model.config.num_attention_heads = 5  # of which no projection has a whole number
    assert "unmade" in trials.outcome_of(model.config, try_sampling)
    [(ids, logps)] = sample_batch(model, [[5, 6]], seeds=[0], max_tokens=4, temperature=1.0, end_ids={2}, pad_id=0)
    alone = small_models.log_probs_alone(model, [5, 6], ids, range(len(ids)))
    torch.testing.assert_close(torch.tensor(logps), alone, rtol=1e-5, atol=1e-5)
    assert score(model, [Tree([5, 6], (ids,))]).are_logits


@pytest.mark.parametrize(("shown", "window", "tokens"), [("all", None, 48), ("before", 64, 48), ("before", 32, 32)])
def test_no_way_is_taken_behind_the_context_of_a_dynamic_rope(shown: str, window: int | None, tokens: int) -> None:
    config = MistralConfig(max_position_embeddings=48, sliding_window=window, rope_parameters=DYNAMIC)
    assert trials.longest({BATCHED: shown}, BATCHED, config) == tokens
    assert trials.longest({BATCHED: None}, BATCHED, config) == trials.longest({}, BATCHED, config) == 0


@pytest.mark.parametrize(("defect", "wrong"), [(0.0, ""), (2e-4, "off by 0.0002"), (1.0, "off by 1")])
def test_what_rounding_magnifies_is_told_from_a_defect_in_float64(defect: float, wrong: str) -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    def magnified() -> torch.Tensor:
        tenth = torch.ones(1, dtype=model.dtype).float() / 10
        return (tenth.double() - 0.1) * 1e6 + defect

    assert 1e-3 < magnified() < 2
    assert trials.agrees(model, magnified) == wrong
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_rows_behind_the_context_of_a_dynamic_rope_are_scored_alike_in_any_order() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=CONTEXT, rope_parameters=DYNAMIC)
    trees = [Tree([5, 6, 7], ([8 + i % 80 for i in range(length - 3)],)) for length in (CONTEXT, 40, 90, 20)]
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        alone = []
        for tree in trees:
            fresh = AutoModelForCausalLM.from_config(config).eval()
            fresh.load_state_dict(model.state_dict())
            logits = fresh(input_ids=torch.tensor([[*tree.prompt, *tree.branches[0]]]), use_cache=False).logits
            alone.append(logits[0, 2:-1].log_softmax(-1).gather(-1, torch.tensor(tree.branches[0])[:, None])[:, 0])
        for order in ([2, 1, 0, 3], [3, 1, 2, 0]):
            for number in order:
                found = token_log_probs(model, score(model, [trees[number]]))
                torch.testing.assert_close(found, alone[number], rtol=1e-4, atol=1e-4)
