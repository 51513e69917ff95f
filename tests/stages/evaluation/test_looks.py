"""Planned looks: bounds as tabled, the level over all looks by simulation, and what stopping early saves."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from stages.evaluation.comparison import crossing, levels, parts
from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import pair, rejects
from stages.evaluation.planner import Design, TaskModel, draw

NUM = 500
TABLED = {2: 1.977, 3: 2.004, 4: 2.024, 5: 2.040, 10: 2.087}
"""Jennison and Turnbull, Group Sequential Methods (2000), table 2.3, two-sided .05."""


@pytest.mark.parametrize(("num_looks", "constant"), TABLED.items())
def test_bounds_are_those_of_the_tables(num_looks, constant):
    found = norm.isf(np.array(levels(num_looks)) / 2)
    assert found == pytest.approx([constant * np.sqrt(num_looks / k) for k in range(1, num_looks + 1)], abs=6e-4 * 3)


def test_one_look_is_the_test_itself():
    assert levels(1) == (0.05,)
    assert crossing(norm.isf(0.025), 1) == pytest.approx(0.05)


def test_every_task_is_in_one_part():
    for num_tasks, num_looks in ((120, 4), (7, 3), (2, 5), (1, 1)):
        covered = [index for part in parts(num_tasks, num_looks) for index in part]
        assert covered == list(range(num_tasks)) and all(map(len, parts(num_tasks, num_looks)))
    assert parts(0, 3) == []


def by_look(model, design, gain, num_looks, num, *, each_at=None):
    """Each look's number of tasks, their paired outcomes, signs and level, tasks in random order as they are drawn."""
    random = np.random.default_rng(3)
    order = random.permutation(design.num_tasks)
    family_T = np.repeat(np.arange(len(design.sizes)), design.sizes)
    treatment, baseline = (arm[:, :, order] for arm in draw(model, design, gain, num, random))
    for part, level in zip(parts(design.num_tasks, num_looks), each_at or levels(num_looks), strict=True):
        families = family_T[order[: part.stop]]
        unit_T = np.unique(families, return_inverse=True)[1]
        now = pair(treatment[:, :, : part.stop], baseline[:, :, : part.stop], unit_T, fixed=design.fixed)
        yield part.stop, now, draw_signs(len(now.sizes_U), random, 799), level


def looked(model, design, gain, num_looks, num, *, each_at=None):
    """Per run the task count at the end and whether a gain was found."""
    open_X, tasks_X, gains_X = np.ones(num, bool), np.full(num, design.num_tasks), np.zeros(num, bool)
    for tasks, now, signs, level in by_look(model, design, gain, num_looks, num, each_at=each_at):
        found = rejects(now, 0.0, signs, level) & open_X
        tasks_X[found], gains_X[found] = tasks, now.mean_X[found] > 0
        open_X &= ~found
    return tasks_X, gains_X


def held_throughout(model, design, gain, num_looks, num, *, each_at=None):
    """The share of runs in which the truth lies in the intervals of all looks."""
    held_X = np.ones(num, bool)
    for _, now, signs, level in by_look(model, design, gain, num_looks, num, each_at=each_at):
        held_X &= ~rejects(now, gain, signs, level)
    return held_X.mean()


MODEL = TaskModel(pass_rate=0.25, samples_differ=0.2, arms_differ=0.22, family_correlation=0.1, seed_sd=0.0)


def test_looks_together_keep_the_level():
    """One look too many would show: at 5 % each, four looks find something in 12 % of runs where there is nothing."""
    design = Design((1,) * 120, fixed=True)
    _, gains = looked(MODEL, design, 0.0, 4, NUM)
    assert gains.mean() <= 0.025 + 2 * np.sqrt(0.025 * 0.975 / NUM)
    _, naive = looked(MODEL, design, 0.0, 4, NUM, each_at=(0.05,) * 4)
    assert naive.mean() > 1.5 * gains.mean()


KATA = (9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1)
LAYOUTS = {
    "fixed strata": (replace(MODEL, family_correlation=0.0), Design((1,) * 120, fixed=True)),
    "random families": (MODEL, Design(KATA)),
    "three training seeds": (replace(MODEL, seed_sd=0.02), Design(KATA, seeds=3)),
}


@pytest.mark.parametrize("num_looks", [4, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_intervals_of_all_looks_hold_together(layout, num_looks):
    """So it may be stopped at any of them. Plain 95 % intervals fail: four of them hold together in 85 to 90 %."""
    model, design = LAYOUTS[layout]
    noise = 2.6 * np.sqrt(0.05 * 0.95 / NUM)
    assert held_throughout(model, design, 0.05, num_looks, NUM) >= 0.935 - noise
    assert held_throughout(model, design, 0.05, num_looks, NUM, each_at=(0.05,) * num_looks) < 0.935 - noise


def test_a_large_gain_ends_early_at_no_loss_of_power():
    design = Design((1,) * 360, fixed=True)
    tasks, gains = looked(MODEL, design, 0.10, 4, 100)
    _, whole = looked(MODEL, design, 0.10, 1, 100)
    assert gains.mean() > whole.mean() - 0.04
    assert tasks.mean() < 0.75 * design.num_tasks
