"""The alarm's level over a whole run, by simulation, and what it counts."""

import math

import numpy as np
import pytest
import torch

from stages.probe.adapters.layout import Layout
from stages.probe.checks.alarm import alarm
from stages.probe.directions.extraction import PairGradients, extract
from stages.probe.directions.scoring import beside_honest

LAYOUT = Layout({f"m{i}": 30 for i in range(8)})
CHECKPOINTS, PAIRS = 10, 24


def watched(seed: int, *, kind: str, push: float = 0.0) -> bool:
    """Whether a run is alarmed: sums of gradients that have an aim of their own, some coordinates' more than others'.

    `kind` says where v comes from: pairs whose hack sides are honest answers too, or hacks, whose axis gets `push`.
    """
    torch.manual_seed(seed)
    width = LAYOUT.width
    profile = torch.logspace(0, -1.5, width)[torch.randperm(width)]

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, width) * profile

    axis = noise(1)
    tokens = torch.full((PAIRS,), 20)
    hack = 20 * (noise(PAIRS) + (axis if kind == "hacks" else 0))
    pairs = PairGradients(LAYOUT, hack, 20 * noise(PAIRS), tokens, tokens)
    direction = extract(LAYOUT, pairs.differences("nll_mean"))
    families, units = beside_honest(direction, pairs, "nll_mean", 199, seed)
    steps = 0.5 * noise(1) + noise(2 * CHECKPOINTS) + push * axis
    looks = steps.view(2, CHECKPOINTS, width).cumsum(1).flatten(0, 1)
    cosines = (looks @ units.T / looks.norm(dim=1, keepdim=True)).double().numpy()
    return alarm(cosines, families).first is not None


def test_an_unrelated_direction_alarms_in_one_run_of_twenty_at_most() -> None:
    """Honest runs with an aim, ten checkpoints of two looks each, v from pairs without hacks; at most 10 expected."""
    assert sum(watched(seed, kind="no hacks") for seed in range(200)) <= 18  # more in 1 of 100 such tests


def test_a_run_toward_the_hack_is_alarmed() -> None:
    assert sum(watched(seed, kind="hacks", push=0.5) for seed in range(20)) >= 18


@pytest.mark.parametrize(("above", "first"), [(True, 1), (False, None)])
def test_the_alarm_is_at_the_first_look_above_the_threshold(above: bool, first: int | None) -> None:
    rng = np.random.default_rng(0)
    placebos = rng.choice([-1.0, 1.0], size=(3, 99))
    v = np.array([0.5, 1.5 if above else 0.9, 2.0 if above else 1.0])
    found = alarm(np.column_stack([v, placebos]), ["haar"] * 99)
    assert found.threshold == 1.0 and found.first == first
    assert np.allclose(found.z, v)


def test_looks_without_a_cosine_count_for_nothing_and_few_placebos_never_alarm() -> None:
    cosines = np.column_stack([[math.nan, 9.0], np.vstack([np.full(18, math.nan), np.linspace(-1, 1, 18)])])
    found = alarm(cosines, ["haar"] * 18)
    assert math.isnan(found.z[0]) and found.threshold == math.inf and found.first is None


def test_families_made_of_hacks_do_not_raise_the_threshold() -> None:
    rng = np.random.default_rng(0)
    cosines = np.column_stack([np.full(2, 5.0), rng.normal(size=(2, 99)), 50 * rng.normal(size=(2, 99))])
    assert alarm(cosines, ["haar"] * 99 + ["hack_hack"] * 99).first == 0
    assert alarm(cosines, ["haar"] * 99 + ["clean_clean"] * 99).first is None
