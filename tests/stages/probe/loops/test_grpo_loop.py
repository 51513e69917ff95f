"""The search for a student between base and teacher."""

import pytest

from stages.errors import BadInput
from stages.probe.loops.grpo_loop import find_alpha


def test_alpha_is_bisected_and_a_teacher_that_never_hacks_is_refused() -> None:
    alpha, rate = find_alpha(lambda place: place**2)
    assert 0.3 <= rate <= 0.6 and rate == alpha**2
    with pytest.raises(BadInput, match="No mixture"):
        find_alpha(lambda place: 0.0)
