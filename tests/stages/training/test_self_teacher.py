"""The student as its own teacher: as it is, its moving average, held near its start; and across a checkpoint."""

from pathlib import Path

import torch
from support.models import tiny_model

from stages.training.self_teacher import SelfTeacher
from stages.training.settings import Hints
from stages.training.trees import Tree, logits, score

TREES = [Tree([5, 6, 7], ([8, 9, 10],))]


def of(model: torch.nn.Module) -> torch.Tensor:
    return logits(model, score(model, TREES))


def moved(model: torch.nn.Module, by: float) -> torch.nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by)
    return model


def test_by_default_the_student_itself_teaches() -> None:
    model = tiny_model()
    teacher = SelfTeacher(Hints(), model)
    assert torch.equal(teacher.logits(moved(model, 0.01), TREES), of(model))


def test_a_moving_average_follows_by_its_rate_after_every_step() -> None:
    model, expected = tiny_model(), tiny_model()
    teacher = SelfTeacher(Hints(teacher="ema"), model)
    moved(model, 0.1)
    assert torch.equal(teacher.logits(model, TREES), of(expected)), "it starts as the student does"
    teacher.after_step(model)
    torch.testing.assert_close(teacher.logits(model, TREES), of(moved(expected, 0.05 * 0.1)), rtol=1e-4, atol=1e-5)


def test_weights_that_are_no_numbers_are_not_followed() -> None:
    model = tiny_model()
    teacher = SelfTeacher(Hints(teacher="ema"), model)
    teacher.after_step(moved(model, float("nan")))
    assert torch.equal(teacher.logits(model, TREES), of(tiny_model()))


def test_a_trust_region_mixes_logits_of_the_start_and_the_student() -> None:
    model = tiny_model()
    teacher = SelfTeacher(Hints(teacher="trust-region", teacher_rate=0.25), model)
    expected = 0.75 * of(tiny_model()) + 0.25 * of(moved(model, 0.1))
    teacher.after_step(model)
    torch.testing.assert_close(teacher.logits(model, TREES), expected.detach(), rtol=1e-5, atol=1e-6)


def test_the_average_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model()
    first = SelfTeacher(Hints(teacher="ema"), model)
    first.after_step(moved(model, 0.1))
    first.save(tmp_path)
    second = SelfTeacher(Hints(teacher="ema"), tiny_model())
    second.load(tmp_path)
    assert torch.equal(second.logits(model, TREES), first.logits(model, TREES))
