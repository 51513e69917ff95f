"""The student as its own teacher: as it is, its moving average, held near its start; whole or an adapter; resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.models import tiny_model

from composer_stages.training.channels.hints import FILE, SelfTeacher
from composer_stages.training.config import Hints
from composer_stages.training.scoring import Tree, logits, score

TREES = [Tree([5, 6, 7], ([8, 9, 10],))]


def of(model: Any) -> torch.Tensor:
    return logits(model, score(model, TREES)).detach()


def taught(teacher: SelfTeacher, model: Any) -> torch.Tensor:
    """Logits of what teaches."""
    found = teacher.predictors(model, TREES)
    kept = found.teacher.head.logits(found.teacher.rows)
    if found.current is None:
        return kept.detach()
    return torch.lerp(kept, found.current.head.logits(found.current.rows), found.share).detach()


def started(kind: str, model: Any, **more: Any) -> SelfTeacher:
    teacher = SelfTeacher(Hints(teacher=kind, **more))
    teacher.begin(model)
    return teacher


def moved(model: Any, by: float) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(by)
    return model


def adapted(seed: int = 0, dropout: float = 0.0) -> Any:
    """A model with an adapter, which starts as the model itself."""
    torch.manual_seed(seed)
    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=dropout))


MADE = {"whole": tiny_model, "adapter": adapted}


@pytest.fixture(params=MADE)
def make(request: pytest.FixtureRequest) -> Any:
    return MADE[request.param]


def test_the_default_teacher_is_the_current_student(make: Any) -> None:
    model = make()
    teacher = started("current", model)
    assert torch.equal(taught(teacher, moved(model, 0.01)), of(model))


def test_a_moving_average_follows_by_its_rate_after_every_step(make: Any) -> None:
    model, expected = make(), make()
    teacher = started("ema", model)
    moved(model, 0.1)
    assert torch.equal(taught(teacher, model), of(expected)), "it starts as the student does"
    student = of(model)
    teacher.after_step(model)
    torch.testing.assert_close(taught(teacher, model), of(moved(expected, 0.05 * 0.1)), rtol=1e-4, atol=1e-5)
    assert torch.equal(of(model), student), "the student keeps its own weights"


def test_weights_that_are_no_numbers_are_not_followed(make: Any) -> None:
    model = make()
    teacher = started("ema", model)
    teacher.after_step(moved(model, float("nan")))
    assert torch.equal(taught(teacher, model), of(make()))


def test_a_trust_region_mixes_logits_of_the_start_and_the_student(make: Any) -> None:
    model = make()
    teacher = started("trust-region", model, teacher_rate=0.25)
    expected = 0.75 * of(make()) + 0.25 * of(moved(model, 0.1))
    teacher.after_step(model)
    torch.testing.assert_close(taught(teacher, model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ema", "trust-region"])
def test_the_teacher_goes_on_from_a_checkpoint(kind: str, make: Any, tmp_path: Path) -> None:
    model = make()
    first = started(kind, model)
    first.after_step(moved(model, 0.1))
    first.save(tmp_path)
    second = SelfTeacher(Hints(teacher=kind))
    second.load(tmp_path)
    second.begin(model)  # a resumed student has moved already
    assert torch.equal(taught(second, model), taught(first, model))


def test_under_an_adapter_only_the_adapter_is_copied(tmp_path: Path) -> None:
    model = adapted()
    started("ema", model).save(tmp_path)
    kept = load_file(tmp_path / FILE)
    assert kept.keys() == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in kept)
    started("trust-region", model).save(tmp_path / "none")
    assert not (tmp_path / "none").exists(), "its start is the model with the adapter off"


def test_scoring_as_teacher_keeps_the_students_gradient(make: Any) -> None:
    """The student's graph is built before the teacher borrows the modules, and differentiated after."""
    model, alone = make(), make()
    teacher = started("ema", model)
    for one in (model, alone):
        moved(one, 0.05)
    loss = logits(model, score(model, TREES)).logsumexp(-1).sum()
    taught(teacher, model)
    loss.backward()
    logits(alone, score(alone, TREES)).logsumexp(-1).sum().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True) if a.requires_grad]
    assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_a_teacher_is_scored_without_dropout() -> None:
    model = adapted(dropout=0.5).train()
    teacher = started("ema", moved(model, 0.1))
    assert torch.equal(taught(teacher, model), taught(teacher, model))
    assert model.training


def test_an_error_while_scoring_as_teacher_restores_the_weights() -> None:
    model = tiny_model()
    teacher = started("ema", model)
    before = dict(model.named_parameters())
    with pytest.raises(IndexError):
        teacher.predictors(model, [Tree([10**6], ([1],))])
    assert all(weight is before[name] for name, weight in model.named_parameters())
