"""A tiny random Qwen3 with a byte-level tokenizer and a ChatML template, saved as an ordinary Hugging Face folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(characters: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte and three special ones; with `characters` only those, so that random models often stop."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() if characters is None else characters)
    vocabulary = {c: i for i, c in enumerate(["<|unk|>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(seed: int = 0, vocabulary: int = 260, scale: float = 1.0) -> Qwen3ForCausalLM:
    """Two layers of width 32, float32, random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        initializer_range=0.2 * scale,
    )
    return Qwen3ForCausalLM(config).eval()


def save_tiny(folder: Path, seed: int = 0, characters: str | None = "abcdefghijkl\u0120") -> Path:
    """Write model and tokenizer, by default of few characters; None for one token a byte. Returns the folder."""
    tokenizer = tiny_tokenizer(characters)
    model = tiny_model(seed, len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_larger(folder: Path) -> Path:
    """Of more parameters than what counts as small: 17 million."""
    tokenizer = tiny_tokenizer()
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def on_hub(cache: Path, commits: Sequence[str]) -> Callable[[str], object]:
    """Keep versions of the hub's model `of/hub` in a cache; returns what makes a commit the newest."""
    folder = cache / "models--of--hub"
    for seed, commit in enumerate(commits):
        save_tiny(folder / "snapshots" / commit, seed=seed)
    (folder / "refs").mkdir()
    return (folder / "refs" / "main").write_text
