"""Wider attention heads for a small model: vLLM on a CPU has none of 16, which is what `training.new_model` makes."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

SERVED = 32
"""A width that vLLM knows everywhere."""


def with_heads(model: "Qwen3ForCausalLM", head_dim: int = SERVED) -> "Qwen3ForCausalLM":
    """An untrained model of the same size with fewer, wider attention heads."""
    config: Any = deepcopy(model.config)
    heads, keys = (n * config.head_dim // head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, keys, head_dim
    return type(model)(config).float()
