"""A Hugging Face model as one GGUF file, for llama.cpp and what is built on it.

The package `gguf` has the names and layouts of tensors and quantises them; what it leaves to its callers is here: the
keys of a header, llama's order of rotary rows, and the tokenizer. Names of ways to cut text are llama.cpp's
(src/llama-vocab.cpp, `tokenizer_pre`), tried with its b-releases of 2026 through llama-cpp-python 0.3.36.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch

from composer_stages.errors import BadInput

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` in config.json that can be written; GGUF has the same names."""
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
"""Types of matrices by name; vectors are float32 in all of them."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    ("Split", WORDS % "", "ByteLevel", False): "qwen2",
    ("Split", WORDS % "{1,3}", "ByteLevel", False): "llama-bpe",
    ("Digits", True, "ByteLevel", True): "smollm",
    ("ByteLevel", True): "gpt-2",
}
"""How a tokenizer cuts a text before it merges bytes -> llama.cpp's name for that."""


def places(model: Any, tokenizer: Any) -> dict[str, str]:
    """Return the names of a model's tensors in a file; it needs no weights.

    `BadInput` for a model or tokenizer that the file could not hold as it is.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise BadInput("policy.gguf-family", family=config.model_type, families=FAMILIES)
    rope, layers = config.rope_parameters["rope_type"], getattr(config, "layer_types", None) or ()
    parts = {rope: rope != "default", "windows": "sliding_attention" in layers}
    parts[config.hidden_act] = config.hidden_act != "silu"  # llama.cpp computes these families by it alone
    if unnamed := [name for name, is_other in parts.items() if is_other]:
        raise BadInput("policy.gguf-attention", other=unnamed)
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    unread = core["model"]["type"] != "BPE" or core["model"].get("byte_fallback")
    if unread or _cut(core.get("pre_tokenizer") or {}) not in CUTS:
        raise BadInput("policy.gguf-tokenizer", kinds=sorted({*CUTS.values()}))
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    name_map, names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), dict[str, str]()
    # By the tensors: of a checkpoint with a head of its own transformers ties none, whatever config.json says.
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name in model.state_dict():
        if name == "lm_head.weight" and is_tied:
            continue
        if (gguf_name := name_map.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise BadInput("policy.gguf-no-place", name=name, family=config.model_type)
        names[name] = gguf_name
    return names


def write(model: Any, tokenizer: Any, path: Path, kind: str, progress: Callable[[int, int], None]) -> int:
    """Write a model and its tokenizer, which `places` takes; return the number of tensors. kind: a key of `TYPES`."""
    config, names, tensors = model.config, places(model, tokenizer), model.state_dict()
    writer = gguf.GGUFWriter(path, config.model_type)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(Path(config._name_or_path).name or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer, model)
    for number, (name, gguf_name) in enumerate(names.items(), start=1):
        tensor = tensors[name]
        values = tensor.detach().to("cpu", torch.float32).numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, width // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        values, of_tensor = numpy.ascontiguousarray(values), TYPES["f32"] if tensor.ndim < 2 else TYPES[kind]
        if of_tensor == TYPES["q8_0"] and values.shape[-1] % 32:
            of_tensor = TYPES["f16"]  # as llama.cpp's own converter
        writer.add_tensor(gguf_name, gguf.quantize(values, of_tensor), raw_dtype=of_tensor)
        progress(number, len(names))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(names)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, model: Any) -> None:
    """Add tokens, merges, special tokens and the chat template."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in core["added_tokens"]}
    token_of_number = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, types = list[str](), list[int]()
    for number in range(model.config.vocab_size):
        tokens.append(token_of_number.get(number, f"[PAD{number}]"))
        token_type = gguf.TokenType.NORMAL if number in token_of_number else gguf.TokenType.UNUSED
        if number in added:
            special = added[number]["special"]
            token_type = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        types.append(int(token_type))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(CUTS[_cut(core["pre_tokenizer"])])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = core["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    declared = model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if ends:
        writer.add_eos_token_id(ends[0])
    # All that end an answer in llama.cpp; a fourth has no key, but llama.cpp knows the usual ones by their texts.
    for add_end, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), ends[1:], strict=False):
        add_end(end)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    writer.add_chat_template(tokenizer.chat_template)


def _cut(step: dict[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a pre-tokenizer that decide where it cuts."""
    if step.get("type") == "Sequence":
        return tuple(part for each in step["pretokenizers"] for part in _cut(each))
    decides = {"Split": lambda: step["pattern"].get("Regex"), "Digits": lambda: step["individual_digits"]}
    decides |= {"ByteLevel": lambda: step["use_regex"] and not step["add_prefix_space"]}
    kind = step.get("type", "")
    return (kind, decides[kind]()) if kind in decides else (kind,)
