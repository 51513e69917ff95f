"""Effect sizes of known data."""

import numpy as np
import pytest

from stages.probe.checks.contrasts import compare_effects
from tests.stages.probe.checks.scored import scored_rows


def test_effects_are_cohens_d_within_strata_and_paired() -> None:
    rows = scored_rows(0, problems=60, effect=1.0, placebos=1, icc=0.0)
    weaker = rows.scores.copy()
    weaker[:, 1] = rows.scores[:, 0] - 0.5 * rows.hacked
    found = compare_effects(type(rows)(**{**vars(rows), "scores": weaker}), 500, 0)
    assert found.d[0] == pytest.approx(1.0, abs=0.25) and found.d[1] == pytest.approx(0.5, abs=0.25)
    assert found.ratio[1] < found.ratio[0] < found.ratio[2] < 0.8
    same = np.repeat(rows.scores[:, :1], 2, axis=1)
    equal = compare_effects(type(rows)(**{**vars(rows), "scores": same}), 100, 0)
    assert equal.ratio == (1.0, 1.0, 1.0) and equal.difference == (0.0, 0.0, 0.0)
