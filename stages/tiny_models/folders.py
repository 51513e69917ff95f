"""Small models as folders, created on first use by one process and published complete.

Also what determines their bytes without importing torch: library versions, schedules, widths of attention heads.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from stages.runs.activity import dropped_on_stop

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
SERVED_HEAD_DIM = 32
"""Width of attention heads that vLLM supports on every device; on a CPU it has none of 16, `training.new_model`'s."""
Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""
BuiltModel = tuple[Any, Any, str]
"""A model, its tokenizer, and the text of its model card."""


@dataclass(frozen=True)
class FitSchedule:
    """Length and speed of training; the learning rate rises for `warm_up` of the steps and then falls to zero."""

    steps: int
    learning_rate: float
    batch: int = 8
    weight_decay: float = 0.01
    warm_up: float = 0.2
    max_norm: float = 1.0


def ensure_folder(folder: Path, build: Callable[[], BuiltModel]) -> Path:
    """Return the folder; build and save the model first if the folder is missing.

    Of several processes that call this at the same time one builds and the others wait. The model is saved under a
    temporary name and renamed, so that a folder of that name is complete. An error of `build` or of the saving is
    raised, and leaves no folder; a signal that stops the run does the same at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
            with dropped_on_stop():
                try:
                    model, tokenizer, card = build()
                    model.save_pretrained(unfinished)
                    tokenizer.save_pretrained(unfinished)
                    (unfinished / "README.md").write_text(card)
                    unfinished.rename(folder)
                finally:
                    rmtree(unfinished, ignore_errors=True)
    return folder


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide a small model's weights."""
    return {library: version(library) for library in LIBRARIES}


def with_heads(model: "Qwen3ForCausalLM", head_dim: int = SERVED_HEAD_DIM) -> "Qwen3ForCausalLM":
    """Return an untrained model of the same size with fewer, wider attention heads."""
    config: Any = deepcopy(model.config)
    heads, keys = (n * config.head_dim // head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, keys, head_dim
    return type(model)(config).float()
