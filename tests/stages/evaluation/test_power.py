import numpy as np
import pytest

from stages.errors import UsageError
from stages.evaluation.power import kish_design_effect, mcnemar_power, power
from stages.evaluation.stats import mcnemar

TWO_POINTS = [(0.02, 54, 390), (0.04, 32, 782), (0.1, 14, 1959), (0.2, 9, 3922)]


@pytest.mark.parametrize(("discordance", "percent", "connor"), TWO_POINTS)
def test_two_points_on_300_tasks(discordance, percent, connor):
    """Independent figures: simulated power, and the tasks needed by Connor's normal approximation (Biometrics 1987)."""
    plan = power(300, 0.3, discordance)
    assert 100 * plan.power == pytest.approx(percent, abs=2)
    assert connor <= plan.needed_tasks <= 1.1 * connor


def test_power_is_the_rate_at_which_the_test_rejects():
    random = np.random.default_rng(0)
    num_tasks, wins, losses = 200, 0.15, 0.05
    counts = random.multinomial(num_tasks, [wins, losses, 1 - wins - losses], 2000)
    found = np.mean([mcnemar(int(won), int(lost)) < 0.05 and won > lost for won, lost, _ in counts])
    assert mcnemar_power(num_tasks, wins + losses, wins - losses) == pytest.approx(found, abs=0.03)


def test_the_detectable_effect_and_the_needed_tasks_give_80_percent():
    plan = power(400, 0.6, 0.15)
    assert mcnemar_power(400, 0.15, plan.mde) == pytest.approx(0.8, abs=0.01)
    assert mcnemar_power(plan.needed_tasks, 0.15, 0.02) == pytest.approx(0.8, abs=0.01)


def test_families_cost_tasks_and_samples_win_some_back():
    families = kish_design_effect(8, 0.2)
    assert families == pytest.approx(2.4)
    assert kish_design_effect(8, 0.2, num_samples=4, noise_share=0.8) == pytest.approx(2.4 * 0.4)
    plain, clustered = power(400, 0.6, 0.15), power(400, 0.6, 0.15, design_effect=families)
    assert clustered.mde > plain.mde
    assert clustered.power < plain.power
    assert clustered.needed_tasks == pytest.approx(2.4 * plain.needed_tasks, abs=1)


def test_three_tasks_detect_nothing():
    plan = power(3, 0.5, 0.2)
    assert (plan.power, plan.mde) == (0, None)
    assert power(1, 0.5, 0.2, design_effect=4).power == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 0.5, 0.1), "0 tasks"),
        ((100, 1.0, 0.1), "pass rate 1.0"),
        ((100, 0.5, 0.0), "discordance 0.0"),
        ((100, 0.95, 0.05, 0.2), "at most 0.05"),
        ((100, 0.5, 0.1, 0.0), "effect of 0.0"),
        ((100, 0.01, 0.2), "no more tasks are lost"),
    ],
)
def test_impossible_plans_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        power(*arguments)
