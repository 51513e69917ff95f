"""The signal check on drawn differences."""

import torch

from composer_stages.gradients.tensors import Layout
from composer_stages.probe.checks.check import Check
from composer_stages.probe.checks.direction import pair_signal
from composer_stages.probe.direction import extract

LAYOUT = Layout({"a": 40, "b": 8, "c": 16})


def signal(seed: int, size: float, problems: int = 12, per_problem: int = 2) -> Check:
    """The check on differences that those of one problem share a part of, in noise with a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(1, -1, LAYOUT.width)
    shared = torch.randn(problems, LAYOUT.width, generator=generator).repeat_interleave(per_problem, 0)
    own = torch.randn(problems * per_problem, LAYOUT.width, generator=generator)
    own *= torch.rand(len(own), 1, generator=generator).clamp(min=0.05) ** -0.5
    axis = torch.randn(LAYOUT.width, generator=generator)
    differences = (shared + own + size * axis) * scale
    names = [f"p{index // per_problem}" for index in range(len(differences))]
    return pair_signal(extract(LAYOUT, differences), differences, seed, names)


def test_a_common_direction_passes_and_noise_does_not() -> None:
    """One draw of each."""
    assert signal(0, 1.0).status == "PASS" and signal(0, 0.0).status == "FAIL"


def test_fewer_problems_than_a_p_of_a_hundredth_needs_are_inconclusive() -> None:
    found = signal(0, 3.0, problems=7, per_problem=4)
    assert found.status == "INCONCLUSIVE" and "8 problems are needed" in found.detail
