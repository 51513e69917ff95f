"""The student as its own teacher behind a hint: as it is, its moving average, or held near where it started."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.losses.teachers import trust_region_logits, update_average
from stages.training.settings import Hints
from stages.training.trees import Tree, logits, score

FILE = "self_teacher.safetensors"


class SelfTeacher:
    """Made before training, from the model that training starts from; a copy of it is kept where one is needed.

    Source: lasgroup/SDPO 0e6d510 verl/workers/actor/dp_actor.py:52-64 (trust region), 132-151 (moving average).
    """

    def __init__(self, hints: Hints | None = None, start: Any = None) -> None:
        hints = hints or Hints()
        self._kind, self._rate = hints.teacher, hints.teacher_rate
        self._copy = None if self._kind == "current" else deepcopy(start).eval().requires_grad_(False)

    @torch.no_grad()
    def logits(self, student: Any, trees: Sequence[Tree]) -> Float[Tensor, "N V"]:
        """Of all completion tokens."""
        if self._copy is None:
            return logits(student, score(student, trees))
        kept = logits(self._copy, score(self._copy, trees))
        if self._kind == "ema":
            return kept
        return trust_region_logits(kept, logits(student, score(student, trees)), self._rate)

    def after_step(self, student: Any) -> None:
        """Let the moving average follow; a student with weights that are no numbers is not followed, as upstream."""
        if self._copy is None or self._kind != "ema":
            return
        pairs = [(a, b) for a, b in zip(self._copy.parameters(), student.parameters(), strict=True) if b.requires_grad]
        if all(bool(weight.isfinite().all()) for _, weight in pairs):
            update_average([a for a, _ in pairs], [b for _, b in pairs], self._rate)

    def save(self, folder: Path) -> None:
        """Keep the moving average in a checkpoint."""
        if self._copy is not None and self._kind == "ema":
            save_file({name: weight.clone() for name, weight in self._copy.named_parameters()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        if self._copy is None or self._kind != "ema":
            return
        kept = load_file(folder / FILE)
        with torch.no_grad():
            for name, weight in self._copy.named_parameters():
                weight.copy_(kept[name])
