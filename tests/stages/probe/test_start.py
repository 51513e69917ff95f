"""A student between two models, and trainings that start from it."""

from pathlib import Path

import pytest
import torch

from composer_stages import train
from composer_stages.errors import BadInput
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.probe import start
from composer_stages.probe.start import find_alpha, interpolate_weights
from composer_stages.runs.kinds import ROLLOUT, START
from composer_stages.runs.run import Run
from tests.stages.probe.running import HINTED, PLANTED, carry_out, settings


def test_alpha_is_bisected_and_a_teacher_that_never_hacks_is_refused() -> None:
    alpha, rate = find_alpha(lambda place: place**2)
    assert 0.3 <= rate <= 0.6 and rate == alpha**2
    with pytest.raises(BadInput, match="No mixture"):
        find_alpha(lambda place: 0.0)


def test_interpolation_is_the_weighted_mean() -> None:
    ends = [torch.nn.Linear(3, 2) for _ in range(2)]
    base, teacher = ({name: part.detach().clone() for name, part in end.named_parameters()} for end in ends)
    model = torch.nn.Linear(3, 2)
    for alpha in (0.0, 0.25, 1.0):
        interpolate_weights(model, base, teacher, alpha)
        for name, part in model.named_parameters():
            assert torch.allclose(part, (1 - alpha) * base[name] + alpha * teacher[name], atol=1e-7)
    interpolate_weights(model, base, teacher, 0.0)
    assert all(torch.equal(part, base[name]) for name, part in model.named_parameters())
    assert all(part.data_ptr() != base[name].data_ptr() for name, part in model.named_parameters())


@pytest.fixture(scope="module")
def between(models: dict[str, PolicyConfig], tmp_path_factory: pytest.TempPathFactory) -> Run:
    env = PLANTED.model_copy(update={"options": HINTED})
    config = start.Config(env=env, base=models["honest"], teacher=models["loophole"], max_steps=1)
    return carry_out(start, [], config, tmp_path_factory.mktemp("start") / "run")


def test_start_finds_alpha_and_writes_the_model(between: Run, models: dict[str, PolicyConfig]) -> None:
    summary = between.manifest.summary
    assert 0 < summary["alpha"] < 1 and 0.3 <= summary["hack_rate"] <= 0.6
    paths = (str(between.folder(START)), models["honest"].model, models["loophole"].model)
    found, base, teacher = (
        dict(load_model(PolicyConfig(model=path), listener=lambda *_: None)[0].named_parameters()) for path in paths
    )
    assert all(torch.allclose(part, torch.lerp(base[n], teacher[n], summary["alpha"])) for n, part in found.items())


def test_a_training_records_its_start_model(between: Run, models: dict[str, PolicyConfig], tmp_path: Path) -> None:
    config = settings(models["honest"])
    run = carry_out(train, [between], config, tmp_path / "run")
    plain = carry_out(train, [], config, tmp_path / "plain")
    info, other = CheckpointInfo.of(run), CheckpointInfo.of(plain)
    assert info.start.model == str(between.folder(START)) and info.start_identity != other.start_identity
    assert {row["model"] for row in run.rows(ROLLOUT)} == {info.start.model}
