"""A GGUF file gives the answers of the folder that it was written of, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from support.models import SPECIAL, TEMPLATE
from support.refusals import refused
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from composer_stages.errors import BadInput
from composer_stages.policy import gguf, gguf_writing
from composer_stages.runs import store

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "max_position_embeddings": 128}
ROUNDING = {"f32": 1e-5, "f16": 0.05, "bf16": 0.4, "q8_0": 0.4}


def merging_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, of texts that are cut as GPT-2 does it, or as Qwen2 does."""
    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(gguf_writing.WORDS % ""), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    as_qwen = pre_tokenizers.Sequence([words, bytes_alone])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if family == "llama" else as_qwen
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["user fn user fn", "assistant 12 users"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def made(family: str, **more: Any) -> tuple[Any, Any]:
    tokenizer = merging_tokenizer(family)
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 128 if family == "qwen3" else 8}  # transformers reads no other of Qwen3
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer) + 3, **sizes, **more)
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [("llama", "f32", False), ("qwen2", "f32", True), ("qwen3", "f32", False)]
    + [("llama", kind, True) for kind in ("f16", "bf16", "q8_0")],
)
def test_a_file_reads_as_the_model_that_it_was_written_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, tied: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = made(family, tie_word_embeddings=tied)
    path = tmp_path / "m.gguf"
    gguf_writing.write(model, tokenizer, path, kind, lambda done, total: None)
    folder = gguf.convert(path, store.file_sha256(path), lambda *progress: None)
    again, its = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|im_start|>user\nfn 12\u00e9")["input_ids"]
    assert its("<|im_start|>user\nfn 12\u00e9")["input_ids"] == ids
    assert its.chat_template == tokenizer.chat_template and its.eos_token_id == tokenizer.eos_token_id
    model.generation_config.eos_token_id = [3, 4]
    gguf_writing.write(model, tokenizer, path, kind, lambda done, total: None)
    ends = (GGUFReader(path).fields[f"tokenizer.ggml.{end}_token_id"].contents() for end in ("eos", "eot", "eom"))
    assert [*ends] == [tokenizer.eos_token_id, 3, 4]
    with torch.no_grad():
        far = (again(torch.tensor([ids])).logits - model(torch.tensor([ids])).logits).abs().max()
    assert float(far) < ROUNDING[kind]
    assert again.config.tie_word_embeddings == tied


def test_a_head_of_its_own_is_written_whatever_the_configuration_says_of_it() -> None:
    model, tokenizer = made("qwen2", tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    assert gguf_writing.places(model, tokenizer)["lm_head.weight"] == "output.weight"


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "more", "code"),
    [
        ("gemma2", {}, "policy.gguf-family"),
        ("llama", {"rope_parameters": ROPE}, "policy.gguf-attention"),
        ("llama", {"hidden_act": "gelu"}, "policy.gguf-attention"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "policy.gguf-attention"),
        ("llama", {"cut": pre_tokenizers.Metaspace()}, "policy.gguf-tokenizer"),
    ],
)
def test_what_a_file_could_not_hold_is_refused_by_name_before_weights_are_loaded(
    family: str, more: dict[str, Any], code: str
) -> None:
    cut = more.pop("cut", None)
    model, tokenizer = made(family, **more)
    if cut:
        tokenizer.backend_tokenizer.pre_tokenizer = cut
    refused(lambda: gguf_writing.places(model.to("meta"), tokenizer), BadInput, code=code)
