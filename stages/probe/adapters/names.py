"""The names of the adapters and what follows from a name; without torch, so that settings and help are quick."""

from typing import Literal

AdapterName = Literal[
    "antipasto_full", "antipasto_topr", "antipasto_paper", "lora", "lora_frozenA", "lora_random_B", "lora_warmup"
]
SPECTRAL = ("antipasto_full", "antipasto_topr", "antipasto_paper")
"""The adapters that work in singular coordinates, and so need a decomposition."""
LORA_EXTRACT = {
    "lora": "B_only",
    "lora_frozenA": "frozenA",
    "lora_random_B": "random_B_minus_init",
    "lora_warmup": "warmup",
}
"""How a LoRA comes to have gradients at its start, by adapter: what a direction's metadata calls `lora_extract`."""
