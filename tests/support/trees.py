"""Prompts with branches, and the sizes of tiny models of any kind that score them."""

from stages.training.scoring import Tree

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
