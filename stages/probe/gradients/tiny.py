"""A Qwen3 of a few thousand numbers with random weights: real enough for every formula, small enough for every test."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tiny_qwen3(
    *, layers: int = 2, hidden: int = 32, vocab: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32
) -> "PreTrainedModel":
    """A causal LM with `layers` layers, four heads over two key-value heads, no dropout, in eval mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        head_dim=hidden // 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model.to(dtype).eval()  # type: ignore[arg-type]  # transformers wraps `to` without its self
