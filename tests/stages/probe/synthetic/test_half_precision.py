"""Weights in bfloat16: the same verdicts and cosines as in float32, and changes of theta that arrive in the weights."""

import copy

import pytest
import torch
from torch import nn

from stages.probe.adapters.attach import target_linears
from stages.probe.gradients.student import Student
from stages.probe.synthetic.half_precision import HALF, change_arrives, half_precision_checks, wide_student


def test_a_change_of_theta_arrives_in_half_precision_weights() -> None:
    check = change_arrives(wide_student(128))
    assert check.status == "PASS" and check.stat < 0.01


def test_the_check_sees_weights_that_round_a_change_away() -> None:
    class Rounding(Student):
        def move_to(self, theta: torch.Tensor) -> None:
            super().move_to(theta)
            for linear in target_linears(self.model).values():
                linear.weight.data = linear.weight.data.to(HALF)

    sound = wide_student(128)
    check = change_arrives(Rounding(sound.model, None, sound.adapter, sound.folded))
    assert check.status == "FAIL" and check.stat > 0.5


@pytest.mark.slow
def test_verdicts_and_cosines_are_those_of_float32(planted: dict[str, nn.Module]) -> None:
    checks = half_precision_checks(copy.deepcopy(planted["honest"]), planted["loophole"], 0)
    assert {check.name: check.status for check in checks} == dict.fromkeys(
        ("bf16-verdicts", "bf16-cosines", "bf16-128", "bf16-2560"), "PASS"
    )
    assert {check.severity for check in checks} == {"gate"}
