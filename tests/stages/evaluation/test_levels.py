"""How often the estimators are right, by simulation, at the layouts of kata and SWE-bench Lite and near 0 and 1.

The seeds are fixed. With X runs a share has a standard error of sqrt(.05 * .95 / X), half a point at 1,500.
"""

from dataclasses import replace

import numpy as np
import pytest

from stages.evaluation.flips import draw_signs
from stages.evaluation.paired import pair, rejects
from stages.evaluation.planner import Design, TaskModel, draw
from stages.evaluation.stats import rate_interval

KATA = (9, 8, 8, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 3, 2, 2, 1, 1)
LITE = (114, 77, 23, 23, 17, 16, 6, 6, 6, 5, 4, 3)
"""Tasks of the 12 repositories of SWE-bench Lite's test split."""
MIDDLE = TaskModel(base=0.41, repeat=0.06, discordance=0.15, family_share=0.9, seed_spread=0.0)
PLAIN = TaskModel(base=0.25, repeat=0.2, discordance=0.22, family_share=0.1, seed_spread=0.0)
LOW = TaskModel(base=0.03, repeat=0.03, discordance=0.04, family_share=0.3, seed_spread=0.0)
HIGH = replace(LOW, base=0.96)
LAYOUTS = {
    "kata": (MIDDLE, Design(KATA), 0.0),
    "kata, a gain": (MIDDLE, Design(KATA), 0.075),
    "kata, unlike families": (PLAIN, Design(KATA), 0.02),
    "kata near 0": (LOW, Design(KATA), 0.0),
    "kata near 1": (HIGH, Design(KATA), 0.01),
    "Lite, fixed": (PLAIN, Design(LITE, fixed=True), 0.0),
    "Lite, fixed, a gain": (PLAIN, Design(LITE, fixed=True), 0.02),
    "Lite, fixed, near 0": (LOW, Design(LITE, fixed=True), 0.0),
    "Lite, new repositories": (PLAIN, Design(LITE), 0.0),
    "Lite, new repositories, a gain": (PLAIN, Design(LITE), 0.02),
    "Lite, new repositories, near 0": (LOW, Design(LITE), 0.0),
    "300 families": (PLAIN, Design((1,) * 300), 0.02),
    "kata, 4 samples": (PLAIN, Design(KATA, samples=4), 0.02),
    "kata, 3 seeds": (PLAIN, Design(KATA, seeds=3), 0.0),
    "kata, 3 seeds, spread 2": (replace(PLAIN, seed_spread=0.02), Design(KATA, seeds=3), 0.0),
    "kata, 3 seeds, spread 4": (replace(PLAIN, seed_spread=0.04), Design(KATA, seeds=3), 0.0),
    "Lite, fixed, 3 seeds, spread 4": (replace(PLAIN, seed_spread=0.04), Design(LITE, seeds=3, fixed=True), 0.0),
    "kata, 5 seeds, spread 4": (replace(MIDDLE, seed_spread=0.04), Design(KATA, seeds=5), 0.02),
}
RARE = {name for name in LAYOUTS if "near" in name}
"""Where few tasks differ an exact test is conservative: its level is below the nominal one by the size of a step."""


def strata_gain(model, design, gain):
    """The true mean in fixed families, by many tasks of each."""
    many = replace(design, sizes=tuple(400 * size for size in design.sizes), seeds=1)
    treatment, baseline = draw(replace(model, seed_spread=0.0), many, gain, 1, np.random.default_rng(5))
    return float((treatment - baseline).mean())


def errors(name, num, num_flips=399, seed=0):
    """Shares of runs whose interval lies above and below the truth, and that find a gain."""
    model, design, gain = LAYOUTS[name]
    units = design.num_tasks if design.fixed else len(design.sizes)
    unit_T = np.arange(units) if design.fixed else np.repeat(np.arange(units), design.sizes)
    random = np.random.default_rng(seed)
    signs = draw_signs(units, random, num_flips)
    truth = strata_gain(model, design, gain) if design.fixed else gain
    wrong, mean, gained = [], [], []
    for start in range(0, num, 250):
        one = pair(*draw(model, design, gain, min(250, num - start), random), unit_T)
        wrong.append(rejects(one, truth, signs))
        mean.append(one.mean_X)
        gained.append(rejects(one, 0.0, signs) & (one.mean_X > 0))
    wrong, mean, gained = map(np.concatenate, (wrong, mean, gained))
    return float((wrong & (mean > truth)).mean()), float((wrong & (mean < truth)).mean()), float(gained.mean())


@pytest.mark.parametrize("name", LAYOUTS)
def test_intervals_cover_and_gains_are_not_invented(name):
    above, below, gained = errors(name, 750)
    noise = 2.6 * np.sqrt(0.05 * 0.95 / 750)
    coverage = 1 - above - below
    assert coverage >= 0.935 - noise, (above, below)
    if name not in RARE:
        assert coverage <= 0.985
    if LAYOUTS[name][2] == 0:
        assert (above if LAYOUTS[name][1].fixed else gained) <= 0.025 + 2.6 * np.sqrt(0.025 * 0.975 / 750)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_with_more_runs(name):
    num = 6000
    above, below, gained = errors(name, num, num_flips=999, seed=11)
    noise = 2.6 * np.sqrt(0.05 * 0.95 / num)
    coverage = 1 - above - below
    print(f"{name:32s} coverage {coverage:.3f} above {above:.4f} below {below:.4f} gain found {gained:.4f}")
    assert coverage >= 0.935 - noise
    if LAYOUTS[name][2] == 0:
        assert (above if LAYOUTS[name][1].fixed else gained) <= 0.025 + 2.6 * np.sqrt(0.025 * 0.975 / num)


def test_one_seed_invents_gains_where_trainings_differ_which_is_why_it_is_partial_at_most():
    """The limit that the verdict admits: the interval of one seed leaves the spread of trainings out."""
    model = replace(PLAIN, repeat=0.02, discordance=0.05, seed_spread=0.04)
    design = Design((1,) * 400)
    one = pair(*draw(model, design, 0.0, 400, np.random.default_rng(0)), np.arange(400))
    rejected = rejects(one, 0.0, draw_signs(400, np.random.default_rng(1), 399)) & (one.mean_X > 0)
    assert rejected.mean() > 0.15


@pytest.mark.parametrize(("model", "least"), [(MIDDLE, 0.92), (PLAIN, 0.93), (LOW, 0.92), (HIGH, 0.92)])
def test_the_interval_of_one_arm_covers(model, least):
    _, baseline = draw(model, Design(KATA), 0.0, 150, np.random.default_rng(3))
    family_T = np.repeat(np.arange(24), KATA)
    intervals = [rate_interval(passed_T, family_T) for passed_T in baseline[:, 0]]
    assert np.mean([low <= model.base <= high for low, high in intervals]) >= least - 0.03
