"""The planner against simulated rows."""

import pytest

from stages.probe.checks.contrast_checks import Draws, detectable_effect, factorial
from tests.stages.probe.checks.scored import scored_rows


def test_the_planned_effect_passes_about_four_times_in_five() -> None:
    """Of a problem's eight rows, six are the teacher's and 60 % of those hacks; half of the variance lies within."""
    effect = detectable_effect(60, 6, 0.6) * 0.5**0.5
    found = [factorial(scored_rows(seed, effect=effect), Draws(100, 100)).status for seed in range(100)]
    assert 0.65 <= found.count("PASS") / 100 <= 0.92


def test_more_problems_or_answers_show_smaller_effects() -> None:
    assert detectable_effect(60, 8) == pytest.approx(0.313, abs=0.005)
    assert detectable_effect(240, 8) == pytest.approx(detectable_effect(60, 8) / 2)
    assert detectable_effect(60, 15) < detectable_effect(60, 8)
