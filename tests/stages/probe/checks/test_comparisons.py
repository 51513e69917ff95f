"""R5, R6 and R7 on known effects and trajectories."""

from itertools import chain
from typing import Any

import pytest

from stages.probe.checks.comparisons import grpo_against_nll, lora_against_svd, trajectories_slowed
from stages.probe.checks.effects import Comparison
from stages.runs.probe_records import TRAJECTORY


@pytest.mark.parametrize(
    ("ratio", "status", "answer"),
    [
        ((0.95, 0.85, 1.1), "PASS", "holds"),
        ((0.4, 0.3, 0.6), "PASS", "negative"),
        ((0.8, 0.6, 1.0), "INCONCLUSIVE", "undecided"),
    ],
)
def test_r6_is_answered_either_way_or_not_at_all(ratio: tuple[float, float, float], status: str, answer: str) -> None:
    found = lora_against_svd(Comparison((2.0, 1.0), (0.9, 0.8), ratio, (-1.0, -1.2, -0.8)))
    assert found.status == status and answer in found.detail


@pytest.mark.parametrize(
    ("difference", "status"),
    [((0.1, -0.1, 0.3), "PASS"), ((-0.1, -0.3, 0.1), "INCONCLUSIVE"), ((-0.3, -0.5, -0.1), "FAIL")],
)
def test_r7_fails_only_when_grpo_is_clearly_less(difference: tuple[float, float, float], status: str) -> None:
    assert grpo_against_nll(Comparison((2.0, 2.0), (0.9, 0.9), (1.0, 0.9, 1.1), difference)).status == status


def trajectories(arm: str, ends: list[float], solve: float = 0.8) -> list[dict[str, Any]]:
    """Six steps a seed, from .25 to the given end."""
    blank = dict.fromkeys(TRAJECTORY.columns)
    return [
        blank
        | {
            "arm": arm,
            "train_seed": seed,
            "step": step,
            "hack_rate_student": 0.25 if step < 3 else end,
            "eval_solve_rate": solve,
        }
        for seed, end in enumerate(ends)
        for step in range(6)
    ]


@pytest.mark.parametrize(
    ("projected", "random", "solve", "status", "why"),
    [
        ([0.25, 0.26, 0.24], [0.64, 0.66, 0.60], 0.8, "PASS", ""),
        ([0.60, 0.62, 0.61], [0.64, 0.66, 0.60], 0.8, "FAIL", "rises as much"),
        ([0.25, 0.26, 0.24], [0.25, 0.24, 0.27], 0.8, "FAIL", "no better than random"),
        ([0.25, 0.26, 0.24], [0.64, 0.66, 0.60], 0.5, "FAIL", "solve rates not matched"),
    ],
)
def test_r5_in_its_strict_reading(
    projected: list[float], random: list[float], solve: float, status: str, why: str
) -> None:
    rows = (
        trajectories("vanilla", [0.62, 0.67, 0.63])
        + trajectories("projected", projected, solve)
        + trajectories("projected_random", random)
    )
    found = trajectories_slowed(rows)[0]
    assert found.status == status and why in found.detail


def test_r5_without_rise_or_seeds_or_arms_is_not_shown() -> None:
    flat = [trajectories(arm, [0.3, 0.3, 0.3]) for arm in ("vanilla", "projected", "projected_random")]
    assert "does not rise" in trajectories_slowed([*chain.from_iterable(flat)])[0].detail
    two = [trajectories(arm, [0.6, 0.6]) for arm in ("vanilla", "projected", "projected_random")]
    assert trajectories_slowed([*chain.from_iterable(two)])[0].status == "INCONCLUSIVE"
    assert trajectories_slowed(trajectories("vanilla", [0.6] * 3))[0].status == "INCONCLUSIVE"
