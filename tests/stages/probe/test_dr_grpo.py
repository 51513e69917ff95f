"""The surrogate of Dr.GRPO: at ratio 1, and where true ratios are clipped."""

from typing import Any

import torch
from probe_faults.loophole_world import tiny_qwen3

from composer_stages.gradients.basis import SingularValues, Spectrum, factorise, target_linears
from composer_stages.gradients.per_row import TokenRow, adapt, dr_grpo


def rows_and_student() -> tuple[list[TokenRow], Any]:
    model, draw = tiny_qwen3(), torch.Generator().manual_seed(0)
    spectrum = Spectrum({name: factorise(linear.weight) for name, linear in target_linears(model).items()})
    ids = torch.randint(2, 64, (4, 12), generator=draw).tolist()
    return [TokenRow(row[:4], row[4 : 8 + i], [True] * (4 + i)) for i, row in enumerate(ids)], adapt(
        model, None, SingularValues(spectrum)
    )


def test_at_ratio_one_the_surrogate_is_the_nll_gradient_times_the_advantage() -> None:
    rows, student = rows_and_student()
    advantages = [0.5, -0.25, 0.0, 1.0]
    sums, logps = student.gradients(rows)
    expected = torch.tensor(advantages)[:, None] * sums / (4 * 7)
    for behaviour in (None, logps):
        found, _ = student.gradients(rows, dr_grpo(advantages, behaviour, l_max=7, num_rows=4))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_clipped_tokens_teach_nothing() -> None:
    rows, student = rows_and_student()
    _, logps = student.gradients(rows)
    far = [logps[0] - 1.0, logps[1] + 1.0, logps[2] + 3.0, logps[3]]  # rho 2.7, .37, .05, 1
    found, _ = student.gradients(rows, dr_grpo([1.0, -1.0, 1.0, 1.0], far, l_max=7, num_rows=4))
    assert torch.equal(found[:2], torch.zeros_like(found[:2])) and found[3].norm() > 0
