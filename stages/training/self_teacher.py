"""The student as its own teacher behind a hint: as it is, its moving average, or held near where it started.

What a teacher has of its own are the weights that training changes: all, or an adapter's. They are lent to the student
while it is scored as a teacher, so that no second model exists.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.losses.hidden import Predictors
from stages.losses.sdpo_hidden import SelfTaught
from stages.losses.teachers import update_average
from stages.training.settings import Hints
from stages.training.trees import Tree, head, score

FILE = "self_teacher.safetensors"
Weights = dict[str, Tensor]


class SelfTeacher:
    """Made before training; `begin` is told of the model that training starts from, with its adapter if it has one.

    Source: lasgroup/SDPO 0e6d510 verl/workers/actor/dp_actor.py:52-64 (trust region), 132-151 (moving average).
    """

    def __init__(self, hints: Hints | None = None) -> None:
        hints = hints or Hints()
        self._kind, self._rate = hints.teacher, hints.teacher_rate
        self._kept: Weights | None = None

    def begin(self, student: Any) -> None:
        """Copy the weights that training will change, unless a checkpoint gave them.

        With an adapter, a trust region needs none: where training starts is the model with its adapter off.
        """
        if self._kind == "current" or (self._kind == "trust-region" and _has_adapter(student)):
            return
        changing = _changing(student)
        if self._kept is None:
            self._kept = {name: weight.detach().clone() for name, weight in changing.items()}
        self._kept = {name: self._kept[name].to(weight.device) for name, weight in changing.items()}

    @torch.no_grad()
    def predictors(self, student: Any, trees: Sequence[Tree]) -> SelfTaught:
        """Of all completion tokens, without gradient."""
        if self._kind == "current":
            return SelfTaught(_scored(student, trees))
        if self._kind == "trust-region" and _has_adapter(student):
            with _resting(student), student.disable_adapter():
                kept = _scored(student, trees)
        else:
            if self._kept is None:
                self.begin(student)
            with _resting(student), _lent(student, self._kept or {}):
                kept = _scored(student, trees)
        if self._kind == "ema":
            return SelfTaught(kept)
        return SelfTaught(kept, _scored(student, trees), self._rate)

    def after_step(self, student: Any) -> None:
        """Let the moving average follow; a student with weights that are no numbers is not followed, as upstream."""
        if self._kept is None or self._kind != "ema":
            return
        changing = _changing(student)
        if all(bool(weight.isfinite().all()) for weight in changing.values()):
            update_average([self._kept[name] for name in changing], list(changing.values()), self._rate)

    def save(self, folder: Path) -> None:
        """Keep the copied weights in a checkpoint."""
        if self._kept is not None:
            save_file({name: weight.clone() for name, weight in self._kept.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        if (folder / FILE).exists():
            self._kept = load_file(folder / FILE)


def _has_adapter(student: Any) -> bool:
    return hasattr(student, "disable_adapter") and bool(getattr(student, "peft_config", None))


def _changing(student: Any) -> Weights:
    """The weights that are trained, by name, each once."""
    return {name: weight for name, weight in student.named_parameters() if weight.requires_grad}


def _scored(model: Any, trees: Sequence[Tree]) -> Predictors:
    return Predictors(score(model, trees).hidden, head(model))


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """A teacher drops nothing out."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextmanager
def _lent(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights in the place of its own, tied ones wherever they stand; its own are not touched."""
    own = dict(model.named_parameters())
    others = {id(own[name]): nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(weight) in others
    ]
    try:
        for module, name, weight in places:
            setattr(module, name, others[id(weight)])
        yield
    finally:
        for module, name, weight in places:
            setattr(module, name, weight)
