"""Small models as folders: made on first use by one process, whole, and known by all that determines their bytes."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from filelock import FileLock

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, steps in all."""
Made = tuple[Any, Any, str]
"""A model, its tokenizer, and the text of its model card."""


def kept(folder: Path, make: Callable[[], Made]) -> Path:
    """The folder, made first if it is not there. Several processes may ask at once: one makes it, the others wait.

    Whatever `make` or the saving raises is raised, and leaves no folder of that name.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                _save(folder, *make())
    return folder


def _save(folder: Path, model: Any, tokenizer: Any, card: str) -> None:
    """Write beside the folder and rename, so that a folder of that name is whole."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "README.md").write_text(card)
    try:
        unfinished.rename(folder)
    finally:
        rmtree(unfinished, ignore_errors=True)


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide a small model's weights."""
    return {library: version(library) for library in LIBRARIES}


# ---- heads
# Wider attention heads for a small model: vLLM on a CPU has none of 16, which is what `training.new_model` makes.

SERVED = 32
"""A width that vLLM knows everywhere."""


def with_heads(model: "Qwen3ForCausalLM", head_dim: int = SERVED) -> "Qwen3ForCausalLM":
    """An untrained model of the same size with fewer, wider attention heads."""
    config: Any = deepcopy(model.config)
    heads, keys = (n * config.head_dim // head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, keys, head_dim
    return type(model)(config).float()


# ---- schedule
# How long and how fast a small model is trained.


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; the learning rate rises for `warm_up` of the steps and then falls to zero."""

    steps: int
    learning_rate: float
    batch: int = 8
    weight_decay: float = 0.01
    warm_up: float = 0.2
    max_norm: float = 1.0
