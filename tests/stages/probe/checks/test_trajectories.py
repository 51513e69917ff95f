"""R5, R6 and R7 on known effects and trajectories."""

from itertools import chain
from typing import Any

import pytest

from composer_stages.errors import UsageError
from composer_stages.probe.checks.trajectories import (
    arms_learn,
    grpo_against_nll,
    lora_against_svd,
    reductions_match,
    trajectories_slowed,
)
from composer_stages.probe.statistics import EffectComparison
from composer_stages.runs.kinds import TRAJECTORY


@pytest.mark.parametrize(
    ("ratio", "status", "answer"),
    [
        ((0.95, 0.85, 1.1), "PASS", "holds"),
        ((0.4, 0.3, 0.6), "NEGATIVE", "clean negative"),
        ((0.8, 0.6, 1.0), "INCONCLUSIVE", "undecided"),
    ],
)
def test_r6_holds_or_is_a_clean_negative_or_is_unknown(
    ratio: tuple[float, float, float], status: str, answer: str
) -> None:
    found = lora_against_svd(EffectComparison((2.0, 1.0), (0.9, 0.8), ratio, (-1.0, -1.2, -0.8)))
    assert found.status == status and answer in found.detail
    assert found.passed is {"PASS": True, "NEGATIVE": False, "INCONCLUSIVE": None}[status]


@pytest.mark.parametrize(
    ("difference", "status"),
    [((0.0, -0.1, 0.1), "PASS"), ((0.1, -0.3, 0.5), "INCONCLUSIVE"), ((-0.5, -0.7, -0.3), "FAIL")],
)
def test_r7_needs_its_interval_on_one_side_of_the_margin(difference: tuple[float, float, float], status: str) -> None:
    assert grpo_against_nll(EffectComparison((2.0, 2.0), (0.9, 0.9), (1.0, 0.9, 1.1), difference)).status == status


def trajectories(arm: str, ends: list[float], solve: float | None = 0.8, **more: Any) -> list[dict[str, Any]]:
    """Six steps a seed, from .25 to the given end."""
    blank = dict.fromkeys(TRAJECTORY.columns)
    return [
        blank
        | {
            "arm": arm,
            "adapter": "singular-values",
            "mixed": "",
            "train_seed": seed,
            "step": step,
            "hack_rate_student": 0.25 if step < 3 else end,
            "eval_solve_rate": solve,
        }
        | more
        for seed, end in enumerate(ends)
        for step in range(6)
    ]


SLOWED = {"vanilla": [0.62, 0.67, 0.63], "projected": [0.25, 0.26, 0.24], "projected_random": [0.64, 0.66, 0.60]}


def three_arms(ends: dict[str, list[float]] = SLOWED, **more: Any) -> list[dict[str, Any]]:
    return [*chain.from_iterable(trajectories(arm, values, **more) for arm, values in ends.items())]


@pytest.mark.parametrize(
    ("projected", "random", "solve", "status", "why"),
    [
        ([0.25, 0.26, 0.24], [0.64, 0.66, 0.60], 0.8, "PASS", ""),
        ([0.60, 0.62, 0.61], [0.64, 0.66, 0.60], 0.8, "FAIL", "rises as much"),
        ([0.25, 0.26, 0.24], [0.25, 0.24, 0.27], 0.8, "FAIL", "no better than random"),
        ([0.25, 0.26, 0.24], [0.64, 0.66, 0.60], 0.5, "FAIL", "solve rates not matched"),
        ([0.50, 0.52, 0.35], [0.64, 0.66, 0.60], 0.8, "INCONCLUSIVE", "projected rising less not shown"),
    ],
)
def test_r5_fails_without_any_of_its_conditions(
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
    assert "does not rise" in trajectories_slowed(three_arms(dict.fromkeys(SLOWED, [0.3] * 3)))[0].detail
    assert trajectories_slowed(three_arms(dict.fromkeys(SLOWED, [0.6] * 2)))[0].status == "INCONCLUSIVE"
    assert trajectories_slowed(trajectories("vanilla", [0.6] * 3))[0].status == "INCONCLUSIVE"


def test_an_unknown_solve_rate_does_not_count_as_matched() -> None:
    found = trajectories_slowed(three_arms(solve=None))[0]
    assert found.status == "INCONCLUSIVE" and "solve rates unknown" in found.detail


def test_solve_rates_match_when_their_interval_lies_inside_the_margin() -> None:
    rows = three_arms()
    uneven = {0: 0.95, 1: 0.65, 2: 0.80}
    spread = [
        row | {"eval_solve_rate": uneven[row["train_seed"]]} if row["arm"] == "projected" else row for row in rows
    ]
    assert trajectories_slowed(rows)[0].status == "PASS"
    found = trajectories_slowed(spread)[0]
    assert found.status == "INCONCLUSIVE" and "not shown to match" in found.detail


def test_a_lora_that_slows_nothing_fails_beside_an_svd_that_does() -> None:
    lora = three_arms(SLOWED | {"projected": [0.63, 0.66, 0.61]}, adapter="lora")
    found = {check.name: check.status for check in trajectories_slowed([*three_arms(), *lora])}
    assert found["R5:singular-values"] == "PASS" and found["R5:lora"] == "FAIL"


def test_one_trajectory_given_twice_is_refused() -> None:
    rows = three_arms()
    with pytest.raises(UsageError, match="Give each once"):
        trajectories_slowed([*rows, *rows])


def test_a_seed_that_stopped_early_counts() -> None:
    rows = three_arms()
    short = [row for row in rows if row["arm"] != "vanilla" or row["train_seed"] != 0 or row["step"] in (0, 1, 4, 5)]
    assert "over 3 seeds" in trajectories_slowed(short)[0].detail


@pytest.mark.parametrize(
    ("lora", "moved", "status", "said"),
    [
        ([0.26, 0.25, 0.24, 0.25], 1.1, "PASS", "over 4 seeds"),
        ([0.60, 0.62, 0.61, 0.63], 1.1, "FAIL", "by 0.03 with lora"),
        ([0.26, 0.25, 0.24, 0.25], 2.0, "INCONCLUSIVE", "not matched, set learning_rate"),
        ([0.10, 0.40, 0.20, 0.30], 1.1, "INCONCLUSIVE", "over 4 seeds"),
        ([0.26, 0.25], 1.1, "INCONCLUSIVE", "2 seeds of vanilla and projected in common"),
    ],
)
def test_reductions_on_both_adapters_are_equal_within_a_fifth_or_not_or_unknown(
    lora: list[float], moved: float, status: str, said: str
) -> None:
    vanilla, projected = [0.65, 0.66, 0.63, 0.64], [0.25, 0.26, 0.24, 0.25]
    rows = trajectories("vanilla", vanilla, weight_change=1.0) + trajectories("projected", projected, weight_change=0.9)
    assert reductions_match(rows) == []
    kind = {"adapter": "lora", "weight_change": moved}
    rows += trajectories("vanilla", vanilla, **kind) + trajectories("projected", lora, **kind)
    (found,) = reductions_match(rows)
    assert found.status == status and said in found.detail


LEARNING = {
    "groups": 4,
    "zero_variance_groups": 1,
    "hack_advantage_sum": 0.5,
    "corr_advantage_source": None,
    "ratio_p5": None,
}


@pytest.mark.parametrize(
    ("more", "failing"),
    [
        ({}, []),
        ({"zero_variance_groups": 4}, ["variance"]),
        ({"hack_advantage_sum": -0.5}, ["advantages"]),
        ({"corr_advantage_source": 0.99}, ["advantages"]),
        ({"ratio_p5": 0.5, "ratio_p95": 1.5, "ess": 0.9}, []),
        ({"ratio_p5": 0.5, "ratio_p95": 1.5, "ess": 0.9, "saturated": "60% are lost", "mixed": "ratio"}, ["ratios"]),
        ({"ratio_p5": 0.5, "ratio_p95": 1.5, "ess": 0.9, "saturated": "60% are lost", "mixed": "imitation"}, []),
        ({"ratio_p5": 1.0, "ratio_p95": 1.0, "ess": 1.0, "mixed": "ratio"}, ["ratios"]),
    ],
)
def test_an_arm_that_has_nothing_to_learn_fails(more: dict[str, Any], failing: list[str]) -> None:
    rows = trajectories("vanilla", [0.6, 0.6], **{**LEARNING, **more})
    found = arms_learn(rows)
    assert [check.name.partition(":")[0] for check in found if check.status != "PASS"] == failing
    assert {check.name.partition(":")[2] for check in found} == {"vanilla"}
