"""The distributions against those of scipy, which the light installation does without."""

import numpy as np
import pytest
from scipy import special

from stages.evaluation.distributions import normal_cdf, student_cdf, student_quantile

T = np.concatenate([-np.logspace(-3, 3, 60), [0], np.logspace(-3, 3, 60)])


@pytest.mark.parametrize("df", [2, 3, 4, 49, 1999, 999_999])
def test_student(df: int) -> None:
    assert np.allclose(student_cdf(df, T), special.stdtr(df, T), rtol=1e-8, atol=1e-300)
    p = 1 - np.logspace(-6, np.log10(0.5), 30)
    assert np.allclose(student_quantile(df, p), special.stdtrit(df, p), rtol=1e-7, atol=1e-8)


def test_normal() -> None:
    assert np.allclose(normal_cdf(T / 30), special.ndtr(T / 30), rtol=1e-12, atol=1e-300)
