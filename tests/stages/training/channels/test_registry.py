"""A channel from outside the package needs a class and an entry in the registry, and nothing more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.trainings import metrics_of, settings

from composer_stages import train
from composer_stages.errors import UsageError
from composer_stages.runs import runner
from composer_stages.runs.run import Run
from composer_stages.training.channels import CHANNELS, ChannelSpec
from composer_stages.training.channels.base import Channel, ChannelLoss, Metric
from composer_stages.training.channels.rollouts import RolloutRows, RolloutSource
from composer_stages.training.config import Weights
from composer_stages.training.scoring import logits


class OwnEntropy(Channel[RolloutRows]):
    """Mean entropy (nats) at the student's own tokens, to be kept low."""

    source = RolloutSource

    def loss(self, rows: RolloutRows) -> ChannelLoss:
        logps = logits(rows.model, rows.scored).log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1)  # [N]
        metrics = {"tokens": Metric("sum", rows.own.sum())}
        return ChannelLoss((entropies * rows.own).sum() / rows.tokens, rows.tokens, metrics)


class BareLoss(OwnEntropy):
    """Returns a tensor alone, as a loss function elsewhere does."""

    def loss(self, rows: RolloutRows) -> Any:
        return super().loss(rows).loss


@pytest.fixture
def registered() -> Iterator[None]:
    described = "Entropy at the student's own tokens."
    CHANNELS["own_entropy"] = ChannelSpec(OwnEntropy, described, columns={"tokens": "own tok"})
    CHANNELS["bare_loss"] = ChannelSpec(BareLoss, described)
    yield
    del CHANNELS["own_entropy"], CHANNELS["bare_loss"]


def config(model: Path, **weights: float) -> train.Config:
    return settings(model, optimisation={"steps": 1, "generations": 2}, weights=weights)


@pytest.mark.usefixtures("registered")
def test_a_channel_from_outside_trains(tmp_path: Path, tiny: Path) -> None:
    asked = config(tiny, own_entropy=1.0)
    assert asked.identity()["weights"] == {**Weights().identity(), "own_entropy": 1.0}
    run = Run(runner.execute("train", {}, asked, root=tmp_path).path)
    (row,) = metrics_of(run)
    assert row["own_entropy/loss"] > 0 and row["own_entropy/tokens"] == row["own_entropy/denominator"] > 0
    header = (run.read_file("report.txt") or b"").decode().splitlines()[1]
    assert header.split()[-4:-2] == ["entropy", "own_entropy"] and header.endswith("own tok")


@pytest.mark.usefixtures("registered")
def test_a_loss_of_another_type_is_named(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        runner.execute("train", {}, config(tiny, bare_loss=1.0), root=tmp_path)
    assert refusal.value.code == "training.no-channel-loss" and refusal.value.values["channel"] == "bare_loss"


def test_once_unregistered_its_name_is_refused(tiny: Path) -> None:
    with pytest.raises(ValidationError) as refusal:
        config(tiny, own_entropy=1.0)
    (error,) = refusal.value.errors()
    assert error["type"] == "extra_forbidden" and error["loc"] == ("weights", "own_entropy")


@pytest.mark.usefixtures("registered")
def test_a_negative_weight_is_refused(tiny: Path) -> None:
    for name in ("dpo", "own_entropy"):
        with pytest.raises(ValidationError, match="greater than or equal to 0"):
            config(tiny, **{name: -1.0})


def test_names_and_help_come_from_the_registry() -> None:
    assert list(Weights.model_fields) == ["grpo", *CHANNELS]
    for name, channel in CHANNELS.items():
        assert Weights.model_fields[name].description == channel.description
        assert issubclass(channel.load(), Channel)
