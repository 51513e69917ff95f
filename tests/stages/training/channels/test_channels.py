"""Every channel: its gradient reaches the student's own tokens alone, and any cut into parts adds up to the step."""

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_model

from composer_stages.losses.preference import PairLogProbs, dpo_losses
from composer_stages.training.channels import CHANNELS
from composer_stages.training.channels.base import RowSource
from composer_stages.training.channels.hints import HintedTurn, HintSource
from composer_stages.training.channels.opd import FrozenTeacher, TaughtRollout, TaughtSource
from composer_stages.training.channels.pairs import PairSource, TokenPair
from composer_stages.training.channels.rollouts import OwnRollout, RolloutRows, RolloutSource
from composer_stages.training.config import Config, OpdTeacher, Pairs
from composer_stages.training.scoring import Tree, score, token_log_probs
from composer_stages.training.step import Batch, Channels, StepReport

VOCABULARY = 60
STUDENT, REFERENCE, TEACHER = (tiny_model(seed, VOCABULARY) for seed in (0, 1, 2))
PAIRS = [TokenPair("p", Tree([5, 6, 7], ([8, 9], [10, 11, 12]))), TokenPair("q", Tree([13, 14], ([15], [16, 17])))]
HINTED = [HintedTurn(Tree([5, 6, 7], ([8, 9, 10],)), Tree([5, 6, 7, 40, 41], ([8, 9, 10],)))]
ROLLOUTS = [OwnRollout(Tree([5, 6], ([8, 9, 30, 31, 10],)), [1, 1, 0, 0, 1], [-1.0, -1.0, 0.0, 0.0, -1.0])]
DPO_FORMS = Pairs.model_fields["loss_type"].annotation.__args__


def ids(draw: random.Random, longest: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]


def drawn_pair(draw: random.Random, server: bool) -> TokenPair:
    return TokenPair(str(draw.random()), Tree(ids(draw, 12), (ids(draw, 9), ids(draw, 9))))


def drawn_turn(draw: random.Random, server: bool) -> HintedTurn:
    action = (ids(draw, 9),)
    logprobs = [-3.0 * draw.random() for _ in action[0]]
    return HintedTurn(Tree(ids(draw, 12), action), Tree(ids(draw, 12), action), None, logprobs)


def drawn_rollout(draw: random.Random, server: bool) -> OwnRollout:
    """It may have tokens that are not the student's."""
    whole = ids(draw, 14)
    own = [1, *(draw.randint(0, 1) for _ in whole[1:])]
    return OwnRollout(Tree(ids(draw, 6), (whole,)), own, [-3.0 * draw.random() * x for x in own])


def drawn_taught(draw: random.Random, server: bool) -> TaughtRollout:
    """With `server` one of its teachers may be behind a server, which has told log-probs."""
    row = drawn_rollout(draw, server)
    told = [-3.0 * draw.random() for _ in row.mask]
    teachers = draw.choice([{0: None}, {1: None}, {0: None, 1: None}, {0: None, 2: told}][: 4 if server else 3])
    return TaughtRollout(row.tree, row.mask, row.logprobs, teachers)


def pair_source(settings: Config, rows: list[Any], teacher: torch.nn.Module) -> PairSource:
    """Pairs whose reference is the teacher's model."""
    source = PairSource(rows, per_step=2, seed=0)
    if rows:
        source.cache_reference(teacher)
    return source


def hint_source(settings: Config, rows: list[Any], teacher: torch.nn.Module) -> HintSource:
    source = HintSource(settings.hints, None, None, lambda step, found: None)
    source.follower.begin(teacher)
    return source


def taught_source(settings: Config, rows: list[Any], teacher: torch.nn.Module) -> TaughtSource:
    # The last one is behind a server, and its log-probs are in the rows.
    models = (teacher, copy.deepcopy(REFERENCE).to(teacher.dtype), None)
    return TaughtSource([FrozenTeacher(OpdTeacher(), model) for model in models])


KINDS: dict[str, tuple[list[Any], Callable[..., Any], Callable[..., RowSource[Any]]]] = {
    "pairs": (PAIRS, drawn_pair, pair_source),
    "hinted": (HINTED, drawn_turn, hint_source),
    "rollouts": (ROLLOUTS, drawn_rollout, lambda settings, rows, teacher: RolloutSource(teacher)),
    "taught": (
        [TaughtRollout(row.tree, row.mask, row.logprobs, {0: None, 1: None}) for row in ROLLOUTS],
        drawn_taught,
        taught_source,
    ),
}
"""By the kind of rows some of them, what draws one, and what makes their source: a new kind is one more entry, and all
tests try it."""
BATCH = Batch({name: rows for name, (rows, _, _) in KINDS.items()})


def drawn(draw: random.Random, *, server: bool = False, **counts: int) -> Batch:
    """So many ragged rows of each kind; none of those that are not named."""
    return Batch({name: [one(draw, server) for _ in range(counts.get(name, 0))] for name, (_, one, _) in KINDS.items()})


def config(*names: str, form: str = "sigmoid", opd: dict[str, Any] | None = None, **hints: Any) -> Config:
    weights, more = dict.fromkeys(names, 1.0), {"teacher": {"model": "teacher"}, "opd": opd or {}}
    return Config(weights=weights, pairs={"loss_type": form}, hints=hints, optimisation={"steps": 10}, **more)


def channels(settings: Config, rows: Batch, teacher: torch.nn.Module = TEACHER) -> Channels:
    """The channels of these settings, whose reference is the teacher's model as well."""
    return Channels(
        settings, [make(settings, list(rows.source_rows(name)), teacher) for name, (_, _, make) in KINDS.items()]
    )


def losses(rows: Batch, *names: str, teacher: torch.nn.Module = TEACHER, model: torch.nn.Module = STUDENT) -> Any:
    return channels(config(*names, top_k=None), rows, teacher).losses(model, rows)[0]


# Gradients


@pytest.mark.parametrize("name", CHANNELS)
def test_gradient_reaches_the_student_and_never_the_teacher(name: str) -> None:
    model, teacher = tiny_model(0, VOCABULARY), tiny_model(2, VOCABULARY)
    found = losses(BATCH, name, teacher=teacher, model=model)
    assert set(found) == {name}, "a channel without a weight has no loss"
    found[name].loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("name", ["taid", "eopd"])
def test_masked_tokens_have_no_gradient(name: str) -> None:
    """The hidden states that predict masked tokens."""
    scored = score(STUDENT, [ROLLOUTS[0].tree])
    scored.hidden.retain_grad()
    rows = RolloutRows(ROLLOUTS, ROLLOUTS, STUDENT, scored, RolloutSource(TEACHER))
    channel = CHANNELS[name].load()(config(name))
    (gradient,) = torch.autograd.grad(channel.loss(rows).loss, scored.hidden)
    assert all((gradient[i].abs().sum() > 0) == own for i, own in enumerate(ROLLOUTS[0].mask))


def test_dpo_is_the_kernel_on_sequence_sums_and_log_two_at_the_reference() -> None:
    rows = Batch({"pairs": PAIRS})

    def sums(model: torch.nn.Module) -> torch.Tensor:
        scored = score(model, [pair.tree for pair in PAIRS])
        return scored.per_branch(token_log_probs(model, scored)).view(-1, 2)

    found, (own, other) = losses(rows, "dpo", teacher=REFERENCE)["dpo"], map(sums, (STUDENT, REFERENCE))
    expected = dpo_losses(PairLogProbs(own[:, 0], own[:, 1], other[:, 0], other[:, 1])).mean()
    torch.testing.assert_close(found.loss, expected)
    assert found.denominator == 2
    same = losses(rows, "dpo", teacher=REFERENCE, model=REFERENCE)["dpo"].loss
    assert math.isclose(float(same), math.log(2), abs_tol=1e-6)


def test_an_empty_hint_gives_no_divergence() -> None:
    same = HintedTurn(HINTED[0].tree, HINTED[0].tree)
    assert float(losses(Batch({"hinted": [same]}), "sdpo")["sdpo"].loss) == pytest.approx(0.0, abs=1e-7)


def test_a_step_without_rows_has_no_losses() -> None:
    assert channels(config("dpo"), Batch()).losses(STUDENT, Batch()) == ({}, None)


def test_taid_state_survives_a_checkpoint(tmp_path: Path) -> None:
    model, first = tiny_model(0, VOCABULARY).train(), channels(config("taid"), BATCH)
    for step in range(2):
        first.end_step(first.losses(model, BATCH)[0], step)
    assert first.state()["taid"]["momentum"] != 0.0 or first.state()["taid"]["prev_loss"] is not None
    second = channels(config("taid"), BATCH)
    second.load(first.state(), tmp_path)
    assert second.state() == first.state()


# Micro-batches: loss, gradient, metrics and state of each channel are those of the whole step


def step(
    made: Channels, model: torch.nn.Module, parts: list[Batch]
) -> tuple[dict[str, torch.Tensor], dict[str, float], dict[str, Any]]:
    """Gradient by channel, metrics of the step with its cosines, and the state afterwards."""
    report = StepReport(made.weights)
    for part in parts:
        found, _ = made.losses(model, part)
        report.add(found)
        report.add_gradients({name: channel.loss for name, channel in found.items()}, model.parameters())
    made.end_step(report.losses, 3)
    return report.gradients, report.metrics(), made.state()


@pytest.mark.parametrize(
    ("dtype", "tolerance", "seed"),
    [*((torch.float64, 1e-10, seed) for seed in range(16)), *((torch.float32, 1e-5, seed) for seed in range(4))],
)
def test_parts_add_up_to_the_step(dtype: torch.dtype, tolerance: float, seed: int) -> None:
    """Any channels together, any rows of any length, any settings, any number of parts or budget of tokens."""
    draw = random.Random(seed)
    model, teacher = (copy.deepcopy(x).to(dtype).train() for x in (STUDENT, TEACHER))
    names = [name for name in CHANNELS if draw.random() < 0.6] or ["dpo"]
    sampled = draw.random() < 0.4
    rows, count = drawn(draw, server=sampled, **{name: draw.randint(0, 4) for name in KINDS}), draw.randint(1, 8)
    divergence = {"beta": draw.choice([0.0, 0.3, 1.0]), "top_k": draw.choice([None, 5])}
    settings = config(
        *names,
        form=draw.choice(DPO_FORMS),
        top_k=draw.choice([None, 3]),
        tail=draw.choice([True, False]),
        teacher=draw.choice(["current", "ema", "trust-region"]),
        importance_clip=draw.choice([None, 2.0]),
        opd={"form": "sampled"} if sampled else {"form": "divergence", **divergence},
    )
    one, other = (channels(settings, rows, teacher) for _ in range(2))
    evenly = draw.random() < 0.5
    parts = [rows.part(i, count) for i in range(count)] if evenly else rows.packed(draw.randint(1, 120), one.sources)
    whole, cut = step(one, model, [rows]), step(other, model, parts)
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
    rows = drawn(random.Random(1), **dict.fromkeys(KINDS, 3))
    whole, part = (channels(config(*CHANNELS), rows).losses(STUDENT, given)[0] for given in (rows, rows.part(0, 1)))
    assert whole.keys() == set(CHANNELS) and all(torch.equal(whole[name].loss, part[name].loss) for name in whole)


def test_the_cosine_is_that_of_the_summed_step() -> None:
    rows = drawn(random.Random(3), pairs=4, rollouts=4)
    made = channels(config("simpo", "sft", "taid"), rows)
    expected = step(made, STUDENT, [rows])[1]
    found = step(made, STUDENT, [rows.part(i, 4) for i in range(4)])[1]
    cosines = {f"gradient/cosine/{pair}" for pair in ("simpo~sft", "simpo~taid", "sft~taid")}
    assert {name for name in found if name.startswith("gradient/cosine")} == cosines
    for name in cosines:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5) and not math.isnan(found[name])
