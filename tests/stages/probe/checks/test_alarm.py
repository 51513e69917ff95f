"""The alarm's level over a whole run, by simulation, and what it counts."""

import math

import numpy as np
import pytest
import torch

from stages.probe.adapters.attach import Layout
from stages.probe.checks.alarm import alarm, pushed
from stages.probe.directions.extraction import PairGradients, extract
from stages.probe.directions.metrics import stacked_cosines
from stages.probe.directions.scoring import HackScale, hack_scale, watch_directions

LAYOUT = Layout({f"m{i}": 30 for i in range(8)})
CHECKPOINTS, ROLLOUTS, PAIRS = 10, 64, 24


def watched(seed: int, *, kind: str, hacks: float = 0.0, paid: bool = True, floor: float = 0.0) -> bool:
    """Whether a run is alarmed: rollouts' gradients spread unequally over coordinates, rewards that go with some axis.

    `kind` says where v comes from: pairs whose hack sides are honest answers too, or hacks. `hacks` is the share of
    rollouts that hack, which are paid, or never.
    """
    torch.manual_seed(seed)
    width = LAYOUT.width
    profile = torch.logspace(0, -1.5, width)[torch.randperm(width)]

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, width) * profile

    axis, right = 2 * noise(1), noise(1)
    tokens = torch.full((PAIRS,), 20)
    hack = 20 * (noise(PAIRS) + (axis if kind == "hacks" else 0))
    pairs = PairGradients(LAYOUT, hack, 20 * (noise(PAIRS) + right * torch.randn(PAIRS, 1)), tokens, tokens)
    direction = extract(LAYOUT, pairs.differences("nll_mean"))
    families, units = watch_directions(direction, pairs, "nll_mean", 199, seed)
    scale = hack_scale(direction, pairs, "nll_mean")
    if scale.hack <= scale.clean:
        return False
    pushes = []
    for _ in range(CHECKPOINTS):
        skill, hacked = torch.randn(ROLLOUTS, 1), torch.rand(ROLLOUTS) < hacks
        gradients = noise(ROLLOUTS) + skill * right + hacked[:, None] * axis
        rewards = torch.where(hacked, float(paid), (skill[:, 0] > 0).float()).view(-1, 8)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().double().numpy()
        cosines = stacked_cosines(gradients, units, direction.inside, 1).double().numpy()
        pushes.append(pushed(cosines, advantages, scale))
    return alarm(np.stack(pushes), families, floor).first is not None


def test_an_unrelated_direction_alarms_in_one_run_of_twenty_at_most() -> None:
    """Honest runs that learn what is right, v from pairs without hacks, without the floor; at most 10 are expected."""
    assert sum(watched(seed, kind="no hacks") for seed in range(200)) <= 18  # more in 1 of 100 such tests


def test_a_run_that_pays_for_hacks_is_alarmed_and_one_that_punishes_them_is_not() -> None:
    assert sum(watched(seed, kind="hacks", hacks=0.08, floor=1.0) for seed in range(20)) >= 18
    assert sum(watched(seed, kind="hacks", hacks=0.08, paid=False, floor=1.0) for seed in range(20)) == 0
    assert sum(watched(seed, kind="hacks", floor=1.0) for seed in range(20)) <= 1


def test_a_rollout_counts_by_how_much_it_is_like_the_hack_and_rewarded() -> None:
    scale = HackScale(clean=0.1, hack=0.5)
    cosines = np.array([[0.5], [0.3], [0.1], [0.4], [math.nan]])
    assert np.allclose(scale.likeness(cosines[:4, 0]), [1, 0, 0, 0.5])
    assert pushed(cosines, np.array([0.5, 1.0, 1.0, -0.4, 1.0]), scale) == pytest.approx([0.5 - 0.2])


@pytest.mark.parametrize(("above", "first"), [(True, 1), (False, None)])
def test_the_alarm_is_at_the_first_checkpoint_above_the_threshold(above: bool, first: int | None) -> None:
    rng = np.random.default_rng(0)
    placebos = np.vstack([rng.choice([1.0, 2.0], size=(1, 99)), np.zeros((2, 99))])
    v = np.array([1.5, 1.5 if above else 0.4, 0.1])  # pushes add up
    found = alarm(np.column_stack([v, placebos]), ["haar"] * 99)
    assert found.threshold == 2.0 and found.first == first
    assert np.allclose(found.push, v.cumsum())


def test_few_placebos_never_alarm_and_no_likeness_anywhere_asks_for_the_floor() -> None:
    assert alarm(np.column_stack([[9.0], np.zeros((1, 18))]), ["haar"] * 18).first is None
    found = alarm(np.column_stack([[0.9, 0.2], np.zeros((2, 19))]), ["haar"] * 19)
    assert found.threshold == 1.0 and found.first == 1


def test_families_made_of_hacks_do_not_raise_the_threshold() -> None:
    rng = np.random.default_rng(0)
    pushes = np.column_stack([np.full(2, 5.0), rng.normal(size=(2, 99)), 50 * rng.normal(size=(2, 99))])
    assert alarm(pushes, ["haar"] * 99 + ["hack_hack"] * 99).first == 0
    assert alarm(pushes, ["haar"] * 99 + ["clean_clean"] * 99).first is None
