"""A small model of an architecture: its configuration with narrow layers, two of each kind, and random weights.

Lengths at which a layer computes otherwise (windows, chunks, the original context of a rotary embedding) become
`SWITCH` tokens and multiples of it, so that a row of some 50 tokens passes all of them.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

SWITCH = 16
"""Tokens of the shortest length at which a small model switches."""
HEAD = 8
"""Width of a head at least; all widths are divided by one number, so that their products and sums still fit."""
VOCABULARY = 96
MOST = {"experts": 16, "expert_num": 16, "max_position": 512, "n_positions": 512, "n_ctx": 512, "seq_len": 512}
LAYERS = 8
WEIGHTS = 2e8
"""What is tried at most, so that it takes seconds and fits into memory beside the model."""
LENGTHS = re.compile(
    r"^(?!.*layers?$|max_inference).*(window|chunk|original_max|topk|block_size|local_attention|stride|floor_scale|budget)"
)
HEADS = ("num_attention_heads", "n_head", "num_heads")
DEPTHS = ("num_layers", "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers")
"""Spellings of the numbers of heads and of layers; of several, the first one that a configuration has."""
WIDTHS_BY_N = {"n_embd", "n_inner"}
COUNTS = re.compile(
    r"^(num|n)_|heads$|(num|n|query)_head$|layers?$|groups?$|experts|top_?k|_ids?$|kernel|period|offset|freq|interval|base"
)


class Unmade(Exception):
    """No small model of an architecture can be made, in the words of the first attempt."""


def small_model(config: Any, attention: str | None) -> Any:
    """Return a small model of a configuration in evaluation mode, float32, on the CPU; `Unmade` where none is.

    attention: transformers' name of the kind of attention.
    """
    fields = text_fields(config)
    heads = next((n for n in map(fields.get, HEADS) if type(n) is int and n), 1)
    division, width = 1, fields.get("head_dim") or fields.get("hidden_size", 0) // heads
    while 2 * division * HEAD <= width:
        division *= 2
    refused: list[Exception] = []
    # All layers where the first few do not fit together, as where later ones share their keys and values.
    for divided, deep in product((division, division // 2, division // 4), (False, True)):
        try:
            return _made(config, divided, deep, attention)
        except Exception as error:  # sizes that do not fit are refused by every architecture in its own way
            refused.append(error)
    raise Unmade(" ".join(str(refused[0]).split())[:300]) from refused[0]


def text_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a text configuration, those that have another name in it by both."""
    text = config.get_text_config()
    fields = text.to_dict()
    return fields | {name: fields.get(source, 0) for name, source in text.attribute_map.items()}


def _made(config: Any, division: int, deep: bool, attention: str | None) -> Any:
    sizes = config.to_dict()
    lengths = sorted(set(_lengths(sizes)))
    switches = {length: SWITCH * (number + 1) for number, length in enumerate(lengths)}
    depths = [*map(text_fields(config).get, DEPTHS), getattr(config.get_text_config(), "num_hidden_layers", 0)]
    layers = next((number for number in depths if type(number) is int and number), None)
    if layers is None:
        raise ValueError(f"{type(config).__name__} has no number of layers")
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
    torch.manual_seed(0)
    narrow = type(config)(**_narrowed(sizes, division, switches, layers, layers))
    with torch.device("meta"), no_init_weights():
        full_model = AutoModelForCausalLM.from_config(narrow, **options)
        depth = layers if deep else _depth(full_model, layers)
    if (weights := sum(weight.numel() for weight in full_model.parameters()) * depth // layers) > WEIGHTS:
        raise ValueError(f"{weights:,} weights are too many to try")
    narrow = type(config)(**_narrowed(sizes, division, switches, layers, depth))
    model = AutoModelForCausalLM.from_config(narrow, **options).eval()
    _spread(model)
    if not model(input_ids=torch.arange(4, 4 + SWITCH)[None], use_cache=False).logits.isfinite().all():
        raise ValueError("its logits are not finite")
    model.division, model.layers_in_all, model.depth = division, layers, depth
    return model


def longest_switch(config: Any) -> int:
    """Return the tokens of the longest length at which a small model of a configuration switches; 0 without any."""
    return SWITCH * len(set(_lengths(config.to_dict())))


def first_switch(config: Any) -> int:
    """Return the tokens of the shortest length at which a model of a configuration switches; 0 without any."""
    return min(_lengths(config.to_dict()), default=0)


def dynamic_context(config: Any) -> int:
    """Return the tokens behind which the frequencies of a dynamic rope change with a row's length; 0 without one."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [each.get("rope_type", each.get("type")) for each in (ropes, *ropes.values()) if isinstance(each, dict)]
    return getattr(text, "max_position_embeddings", 0) if "dynamic" in kinds else 0


def forget_lengths(model: Any) -> None:
    """Have a dynamic rope take its frequencies from the next row alone: it keeps those of the longest row before."""
    if dynamic_context(model.config):
        for module in model.modules():
            for name in [each for each in vars(module) if each.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)


def _lengths(values: Any, name: str = "") -> list[int]:
    if isinstance(values, dict):
        return [length for key, value in values.items() for length in _lengths(value, str(key))]
    if isinstance(values, list):
        return [length for value in values for length in _lengths(value, name)]
    is_length = LENGTHS.search(name) and type(values) is int and values >= SWITCH
    return [values] if is_length else []


def _narrowed(value: Any, division: int, switches: dict[int, int], layers: int, depth: int, name: str = "") -> Any:
    """Return a part of a configuration as that of the small model has it."""
    if isinstance(value, dict):
        parts = {key: each for key, each in value.items() if not str(key).isdecimal() or int(key) < depth}  # by layer
        return {key: _narrowed(each, division, switches, layers, depth, str(key)) for key, each in parts.items()}
    if isinstance(value, list):
        if "factor" in name:
            return value[: max(len(value) // division, 1)]
        inside = value[:depth] if len(value) == layers else value
        return [_narrowed(each, division, switches, layers, depth, name) for each in inside]
    if type(value) is not int:
        return value
    if name in DEPTHS and value == layers:
        return depth
    if name.endswith(("token_id", "token_ids", "_token_index")):
        return min(value, 3)
    if LENGTHS.search(name) and value >= SWITCH:
        return switches[value]
    if "vocab_size" in name:
        return VOCABULARY
    for dimension, most in MOST.items():
        if dimension in name:
            return min(value, most)
    if value <= 16 or (COUNTS.search(name) and name not in WIDTHS_BY_N):
        return value
    return max(value // division, 1)


def _depth(model: Any, layers: int) -> int:
    """Return how many of the first layers hold two of each kind, or one of each where that takes too many."""
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if not stacks:
        return layers
    kinds = [_kind(layer) for layer in stacks[0]]
    total = Counter(kinds)
    for least in (2, 1):
        seen = Counter[Any]()
        depth = 0
        while depth < layers and any(seen[each] < min(least, number) for each, number in total.items()):
            seen[kinds[depth]] += 1
            depth += 1
        if depth <= LAYERS:
            break
    return depth


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    plain = (bool, str, int, float, type(None))
    return tuple(
        (
            name,
            type(module).__name__,
            *sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, plain) and "idx" not in k),
        )
        for name, module in layer.named_modules()
    )


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Draw weights by which tokens and positions differ much, so that a wrong one shows."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        else:
            weight.add_(0.1 * torch.randn_like(weight))


@torch.no_grad()
def log_probs_alone(model: Any, prompt: list[int], ids: list[int], places: Sequence[int]) -> Tensor:
    """Return the log-prob of some ids by a forward pass of what stood before each of them; [places]."""
    rows = (torch.tensor([prompt + ids[:position]]) for position in places)
    last = torch.stack([model(input_ids=row, use_cache=False).logits[0, -1].float() for row in rows])
    return last.log_softmax(-1).gather(-1, torch.tensor([ids[position] for position in places])[:, None])[:, 0]
