"""Wider heads make another arrangement of the same size, which counts the same tokens."""

import torch
from support.models import tiny_tokenizer

from stages.tiny_models.folders import SERVED, with_heads
from stages.tiny_models.training import new_model


def test_wider_heads_are_fewer_and_the_size_stays() -> None:
    narrow = new_model(tiny_tokenizer())
    wide = with_heads(narrow)
    assert wide.config.head_dim == SERVED and narrow.config.head_dim == 16
    assert (wide.config.num_attention_heads, wide.config.num_key_value_heads) == (4, 2)
    layers = sum(p.numel() for p in narrow.parameters()) - sum(p.numel() for p in wide.parameters())
    assert layers == -2 * 2 * (SERVED - 16), "the norms of queries and keys are as wide as a head"
    assert wide(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, narrow.config.vocab_size)
