"""Every channel's gradient reaches the student's own tokens: no teacher, no reference, no prompt, no masked token."""

import math
from pathlib import Path

import pytest
import torch
from support.models import tiny_model

from stages.losses.preference import PairLogProbs, dpo_losses
from stages.training.channels import CHANNELS
from stages.training.channels.episodes import EpisodeRows, EpisodeSource, OwnEpisode
from stages.training.channels.hints import HintedTurn, HintSource
from stages.training.channels.pairs import PairSource, TokenPair
from stages.training.config import Config, Hints
from stages.training.scoring import Scored, Tree, score, token_log_probs
from stages.training.step import Batch, Channels

PAIRS = [TokenPair("p", Tree([5, 6, 7], ([8, 9], [10, 11, 12]))), TokenPair("q", Tree([13, 14], ([15], [16, 17])))]
HINTED = [HintedTurn(Tree([5, 6, 7], ([8, 9, 10],)), Tree([5, 6, 7, 40, 41], ([8, 9, 10],)))]
EPISODES = [OwnEpisode(Tree([5, 6], ([8, 9, 30, 31, 10],)), [1, 1, 0, 0, 1], [-1.0, -1.0, 0.0, 0.0, -1.0])]
BATCH = Batch({"pairs": PAIRS, "hinted": HINTED, "episodes": EPISODES})


def config(name: str) -> Config:
    return Config(weights={name: 1.0}, hints={"top_k": None}, teacher={"model": "teacher"}, optimisation={"steps": 10})


def channels(name: str, model: torch.nn.Module, teacher: torch.nn.Module | None = None) -> Channels:
    pairs = PairSource(PAIRS, per_step=2, seed=0)
    pairs.cache_reference(tiny_model(seed=1))
    hinted = HintSource(Hints(), None, None, lambda step, found: None)
    return Channels(config(name), [pairs, hinted, EpisodeSource(teacher or tiny_model(seed=2))])


@pytest.mark.parametrize("name", CHANNELS)
def test_gradient_reaches_the_student_and_never_the_teacher(name: str) -> None:
    model, teacher = tiny_model(), tiny_model(seed=2)
    found = channels(name, model, teacher).losses(model, BATCH)[0]
    assert set(found) == {name}
    found[name].loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("name", CHANNELS)
def test_no_weight_no_channel(name: str) -> None:
    other = "sft" if name != "sft" else "simpo"
    assert name not in channels(other, tiny_model()).losses(tiny_model(), BATCH)[0]


@pytest.mark.parametrize("name", ["taid", "eopd"])
def test_masked_tokens_have_no_gradient(name: str) -> None:
    """The hidden states that predict masked tokens."""
    model = tiny_model()
    episode = EPISODES[0]
    scored = score(model, [episode.tree])
    scored.hidden.retain_grad()
    hidden_gradient = _gradient_at_hidden(name, model, scored)
    assert torch.equal(hidden_gradient[2], torch.zeros_like(hidden_gradient[2]))
    assert torch.equal(hidden_gradient[3], torch.zeros_like(hidden_gradient[3]))
    assert all(hidden_gradient[i].abs().sum() > 0 for i in (0, 1, 4))


def _gradient_at_hidden(name: str, model: torch.nn.Module, scored: Scored) -> torch.Tensor:
    channel = CHANNELS[name].load()(config(name))
    rows = EpisodeRows(EPISODES, EPISODES, model, scored, tiny_model(seed=2))
    return torch.autograd.grad(channel.loss(rows).loss, scored.hidden)[0]


def test_dpo_is_the_kernel_on_sequence_sums() -> None:
    model, reference = tiny_model(), tiny_model(seed=1)
    found = channels("dpo", model).losses(model, Batch({"pairs": PAIRS}))[0]["dpo"]
    sums = [_sums(m) for m in (model, reference)]
    expected = dpo_losses(PairLogProbs(sums[0][:, 0], sums[0][:, 1], sums[1][:, 0], sums[1][:, 1])).mean()
    torch.testing.assert_close(found.loss, expected)
    assert found.denominator == 2


def _sums(model: torch.nn.Module) -> torch.Tensor:
    scored = score(model, [pair.tree for pair in PAIRS])
    return scored.per_branch(token_log_probs(model, scored)).view(-1, 2)


def test_at_the_reference_dpo_is_log_two() -> None:
    model = tiny_model(seed=1)
    loss = channels("dpo", model).losses(model, Batch({"pairs": PAIRS}))[0]["dpo"].loss
    assert math.isclose(float(loss), math.log(2), abs_tol=1e-6)


def test_a_hint_that_says_nothing_gives_no_divergence() -> None:
    model = tiny_model()
    same = HintedTurn(HINTED[0].tree, HINTED[0].tree)
    loss = channels("sdpo", model).losses(model, Batch({"hinted": [same]}))[0]["sdpo"].loss
    assert float(loss) == pytest.approx(0.0, abs=1e-7)


def test_a_step_without_rows_has_no_losses() -> None:
    assert channels("dpo", tiny_model()).losses(tiny_model(), Batch()) == ({}, None)


def test_taid_state_survives_a_checkpoint(tmp_path: Path) -> None:
    model, first = tiny_model(), channels("taid", tiny_model())
    for step in range(2):
        first.end_step(first.losses(model.train(), BATCH)[0], step)
    assert first.state()["taid"]["momentum"] != 0.0 or first.state()["taid"]["prev_loss"] is not None
    second = channels("taid", tiny_model())
    second.load(first.state(), tmp_path)
    assert second.state() == first.state()
