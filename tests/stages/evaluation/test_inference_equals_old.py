"""The test of `inference` gives the numbers of the modules that it replaces."""

import numpy as np
import pytest

from stages.evaluation import flips, inference, paired, stats


@pytest.mark.parametrize("layout", range(40))
def test_both_give_the_same_numbers(layout: int) -> None:
    random = np.random.default_rng(layout)
    units, seeds = int(random.choice([1, 5, 8, 12, 20, 60, 200])), int(random.choice([1, 2, 3, 6]))
    sizes = random.integers(1, 9, units)
    unit_T = (
        random.permutation(np.repeat(np.arange(units), sizes)) if layout % 2 else np.repeat(np.arange(units), sizes)
    )
    rates_T = random.random(units)[unit_T]
    arms = [(random.random((seeds, len(unit_T))) < rates_T + more).astype(float) for more in (random.normal() / 10, 0)]
    if layout % 3 == 0 and seeds > 1:
        arms[0][0, 0] = np.nan
    collection_S = np.arange(seeds) // 2 if seeds == 6 else None
    for fixed in (False, True):
        more = {"fixed": fixed, "collection_S": collection_S}
        old = stats.FlipTest(paired.pair(arms[0][None], arms[1][None], unit_T, **more))
        new = inference.PairedTest(arms[0][None], arms[1][None], unit_T, **more)
        for alpha in (0.05, 0.003):
            low, high = new.interval(alpha)
            assert (low[0], high[0]) == pytest.approx(old.interval(alpha), abs=5e-8)
        assert new.p(0.0)[0] == pytest.approx(old.p(0.0), abs=1e-12)
        assert new.estimate_X[0] == pytest.approx(old.units.mean)
        assert new.flips.draws == old.flips.draws
        rate = inference.rate_interval(arms[0], unit_T, **more)
        assert rate == pytest.approx(stats.rate_interval(arms[0], unit_T, **more), abs=1e-12)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("units", [8, 30])
def test_many_at_once(units: int, fixed: bool) -> None:
    random = np.random.default_rng(units)
    unit_T = np.repeat(np.arange(units), 10)
    arms = [(random.random((300, 3, len(unit_T))) < rate).astype(float) for rate in (0.5, 0.45)]
    signs = flips.draw_signs(len(unit_T) if fixed else units, np.random.default_rng(0), 399)
    old = paired.pair(*arms, unit_T, fixed=fixed)
    new = inference.PairedTest(*arms, unit_T, fixed=fixed, num_flips=399)
    for mean in (0.0, 0.02, 0.1):
        assert (new.rejects(mean) == paired.rejects(old, mean, signs)).all()
