"""Every guard passes on a sound world, and of every fault exactly its guard takes notice; weights in bfloat16."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from composer_stages.gradients.basis import target_linears
from composer_stages.gradients.per_row import MeasuredStudent
from composer_stages.probe.checks.gradients import canary
from composer_stages.probe.metrics import row_metrics
from composer_stages.probe.rows import as_tokens
from probe_faults.faults import FAULTS, InjectedFault
from probe_faults.guard_checks import GUARDS, check_guards, failing
from probe_faults.half_precision import HALF, change_error, halved, wide_student
from probe_faults.world import ProbeWorld, build_world


@pytest.fixture(scope="module")
def world(planted: dict[str, nn.Module]) -> ProbeWorld:
    return build_world(planted["honest"], planted["loophole"], 0)


def test_every_guard_passes_on_a_sound_world(world: ProbeWorld) -> None:
    checks = check_guards(world)
    assert failing(checks) == []
    assert [name for name, check in checks.items() if check is not None and check.name != name] == []


NAMES = [fault.name.replace(" ", "-") for fault in FAULTS]
ONE_OF_EACH_KIND = (
    "drop-the-hint",
    "shift-the-mask",
    "negate-v",
    "invert-the-gate",
    "half-base,-all-wrong",
    "one-pair",
)
assert set(ONE_OF_EACH_KIND) <= set(NAMES)
CASES = [
    pytest.param(fault, id=name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow)
    for name, fault in zip(NAMES, FAULTS, strict=True)
]


@pytest.mark.parametrize("fault", CASES)
def test_every_fault_makes_its_guard_fail_and_no_other(fault: InjectedFault, world: ProbeWorld) -> None:
    assert failing(check_guards(fault.inject(world))) == [fault.guard]


def test_every_guard_has_a_fault() -> None:
    assert {guard.name for guard in GUARDS} == {fault.guard for fault in FAULTS}


def test_the_canary_passes_for_a_curved_loss(world: ProbeWorld) -> None:
    """With a step five times as long one central difference is 12 % off, as on a model of thirty layers."""

    class LongStep(MeasuredStudent):
        def weight_scale(self) -> float:
            return 5 * super().weight_scale()

    student = world.student
    student = LongStep(*(getattr(student, field.name) for field in dataclasses.fields(student)))
    tokens = [as_tokens(row) for row in world.pool[:2]]
    check = canary(student, tokens, world.direction, world.measure)
    found, expected = (float(text.split()[-1]) for text in check.detail.split(", ")[1:])
    assert check.status == "PASS" and found == pytest.approx(expected, rel=0.01)


def test_a_change_of_theta_arrives_in_half_precision_weights() -> None:
    assert change_error(wide_student(128)) < 0.01


def test_weights_that_round_changes_away_have_a_large_error() -> None:
    class Rounding(MeasuredStudent):
        def move_to(self, theta: torch.Tensor) -> None:
            super().move_to(theta)
            for linear in target_linears(self.model).values():
                linear.weight.data = linear.weight.data.to(HALF)

    sound = wide_student(128)
    assert change_error(Rounding(sound.model, None, sound.adapter, sound.folded)) > 0.5


@pytest.mark.slow
def test_verdicts_and_cosines_are_those_of_float32(planted: dict[str, nn.Module]) -> None:
    rounded = [copy.deepcopy(planted[name]).to(HALF).float() for name in ("honest", "loophole")]
    worlds = [(wide := build_world(*rounded, 0)), halved(wide, 0)]
    verdicts = [{name: check and check.status for name, check in check_guards(world).items()} for world in worlds]
    assert verdicts[0] == verdicts[1]
    cosines = [row_metrics(world.sums.float(), world.direction)["cos_stack"] for world in worlds]
    assert float((cosines[0] - cosines[1]).abs().max()) <= 0.01
    assert change_error(wide_student(2560)) <= 0.01, "the width of Qwen3-4B"
