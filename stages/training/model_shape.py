"""A model's size from its config.json alone: nothing of its weights is read or held."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.policy import adapters, embedded
from stages.policy.base import PolicyConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM. parameters: tied weights counted once. linears: (inputs, outputs) of those in its layers.

    kv: width of the keys of one layer. bytes: of one weight as it is loaded, 2 or 4.
    """

    parameters: int
    linears: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    kv: int
    vocabulary: int
    bytes: int


def model_shape(policy: PolicyConfig) -> ModelShape | None:
    """The shape of a local model or of an adapter's base; None where no config.json can be had.

    None, too, for models that environments bring along: they are made in seconds, so they are small.
    """
    if embedded.is_embedded(policy.model):
        return None
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    source = str(Path(policy.model).expanduser())
    if adapters.is_adapter(source):
        return model_shape(adapters.base_of(Path(source), policy)[0])
    try:
        config: Any = AutoConfig.from_pretrained(source if Path(source).is_dir() else policy.model)
        with init_empty_weights():
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError):
        return None
    model.tie_weights()  # which a model without weights does not do by itself
    head, text = model.get_output_embeddings(), config.get_text_config()
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    loaded = getattr(config, "dtype", None) if policy.dtype == "auto" else getattr(torch, policy.dtype)
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=tuple((m.in_features, m.out_features) for m in linears),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv=heads * width,
        vocabulary=text.vocab_size,
        bytes=2 if loaded in (torch.bfloat16, torch.float16) else 4,
    )
