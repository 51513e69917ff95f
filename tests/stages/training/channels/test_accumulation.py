"""However a step is cut into micro-batches, each channel's loss, gradient and metrics are those of the whole step."""

import copy
import math
import random

import pytest
import torch
from support.models import tiny_model

from stages.training.channels import CHANNELS
from stages.training.channels.episodes import EpisodeSource, OwnEpisode
from stages.training.channels.hints import HintedTurn, HintSource
from stages.training.channels.pairs import PairSource, TokenPair
from stages.training.config import Config, Hints, Pairs
from stages.training.scoring import Tree
from stages.training.step import Batch, Channels, StepReport

VOCABULARY = 40
STUDENT, TEACHER, START = (tiny_model(seed, VOCABULARY) for seed in (0, 1, 2))
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DPO_FORMS = Pairs.model_fields["loss_type"].annotation.__args__


def ids(draw: random.Random, longest: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]


def batch(draw: random.Random, pairs: int, hinted: int, episodes: int) -> Batch:
    """Ragged rows; an episode may have tokens that are not the student's."""
    turns = []
    for _ in range(hinted):
        action = (ids(draw, 9),)
        logprobs = [-3.0 * draw.random() for _ in action[0]]
        turns.append(HintedTurn(Tree(ids(draw, 12), action), Tree(ids(draw, 12), action), None, logprobs))
    played = []
    for _ in range(episodes):
        whole = ids(draw, 14)
        own = [1, *(draw.randint(0, 1) for _ in whole[1:])]
        played.append(OwnEpisode(Tree(ids(draw, 6), (whole,)), own, [-3.0 * draw.random() * x for x in own]))
    dealt = [TokenPair(str(i), Tree(ids(draw, 12), (ids(draw, 9), ids(draw, 9)))) for i in range(pairs)]
    return Batch({"pairs": dealt, "hinted": turns, "episodes": played})


def channels(names: list[str], rows: Batch, teacher: torch.nn.Module, loss_type: str, hints: Hints) -> Channels:
    pairs = PairSource(list(rows.of("pairs")), per_step=1, seed=0)
    if pairs.pairs:
        pairs.cache_reference(teacher)
    hinted = HintSource(hints, None, None, lambda step, found: None)
    hinted.begin(teacher)
    config = Config(
        weights=dict.fromkeys(names, 1.0),
        pairs={"loss_type": loss_type},
        hints=hints,
        teacher={"model": "teacher"},
        optimisation={"steps": 10},
    )
    return Channels(config, [pairs, hinted, EpisodeSource(teacher)])


def step(
    made: Channels, model: torch.nn.Module, parts: list[Batch]
) -> tuple[dict[str, torch.Tensor], dict[str, float], dict[str, object]]:
    """Gradient by channel, metrics of the step with its cosines, and the state afterwards."""
    report = StepReport(made.weights)
    for part in parts:
        losses, _ = made.losses(model, part)
        report.add(losses)
        report.add_gradients({name: channel.loss for name, channel in losses.items()}, model.parameters())
    made.end_step(report.losses, 3)
    return report.gradients, report.metrics(), made.state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(16))
def test_parts_add_up_to_the_step(dtype: torch.dtype, seed: int) -> None:
    """Any channels together, any rows of any length, any settings, any number of parts or budget of tokens."""
    draw = random.Random(seed)
    model, teacher = (copy.deepcopy(x).to(dtype).train() for x in (STUDENT, TEACHER))
    names = [name for name in CHANNELS if draw.random() < 0.6] or ["dpo"]
    rows, count = batch(draw, *(draw.randint(0, 4) for _ in range(3))), draw.randint(1, 8)
    hints = Hints(
        top_k=draw.choice([None, 3]),
        tail=draw.choice([True, False]),
        teacher=draw.choice(["current", "ema", "trust-region"]),
        importance_clip=draw.choice([None, 2.0]),
    )
    form = draw.choice(DPO_FORMS)
    one, other = (channels(names, rows, teacher, form, hints) for _ in range(2))
    evenly = draw.random() < 0.5
    parts = [rows.part(i, count) for i in range(count)] if evenly else rows.packed(draw.randint(1, 120), one.sources)
    whole, cut = step(one, model, [rows]), step(other, model, parts)
    tolerance = TOLERANCE[dtype]
    assert cut[0].keys() == whole[0].keys() and cut[1].keys() == whole[1].keys()
    for name, gradient in whole[0].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(cut[0][name], gradient, rtol=tolerance, atol=tolerance * max(scale, 1.0))
    for name, value in whole[1].items():
        if "cosine" not in name:  # below, on directions that rounding cannot turn
            assert cut[1][name] == pytest.approx(value, rel=tolerance, abs=tolerance * 10), name
    for channel, state in whole[2].items():
        for name, value in state.items():
            expected = value if value is None else pytest.approx(value, rel=1e-5)
            assert cut[2][channel][name] == expected, (channel, name)


def test_one_part_is_the_step_bit_for_bit() -> None:
    rows = batch(random.Random(1), 3, 3, 3)
    results = []
    for parts in ([rows], [rows.part(0, 1)]):
        made = channels(list(CHANNELS), rows, TEACHER, "sigmoid", Hints())
        results.append({n: c.loss for n, c in made.losses(STUDENT, parts[0])[0].items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_three_hinted_turns_have_one_gradient_in_any_number_of_micro_batches(count: int) -> None:
    rows = batch(random.Random(2), 0, 3, 0)
    made = channels(["sdpo"], rows, TEACHER, "sigmoid", Hints())
    whole = step(made, STUDENT, [rows])[0]["sdpo"]
    cut = step(made, STUDENT, [rows.part(i, count) for i in range(count)])[0]["sdpo"]
    assert float(cut.norm() / whole.norm()) == pytest.approx(1.0, abs=1e-5)


def test_the_cosine_is_that_of_the_summed_step() -> None:
    rows = batch(random.Random(3), 4, 0, 4)
    names = ["simpo", "sft", "taid"]
    made = channels(names, rows, TEACHER, "sigmoid", Hints())
    losses = {name: channel.loss for name, channel in made.losses(STUDENT, rows)[0].items()}
    whole = StepReport(names)
    whole.add_gradients(losses, STUDENT.parameters())
    expected = whole.metrics()
    found = step(made, STUDENT, [rows.part(i, 4) for i in range(4)])[1]
    assert {name for name in found if name.startswith("gradient/cosine")} == {
        "gradient/cosine/simpo~sft",
        "gradient/cosine/simpo~taid",
        "gradient/cosine/sft~taid",
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5) and not math.isnan(value)
