"""Every guard on a sound world, and under every fault."""

import pytest
from support.matrices import few
from torch import nn

from stages.probe.synthetic.faults import FAULTS, Fault
from stages.probe.synthetic.guard_checks import GUARDS, failing, judge
from stages.probe.synthetic.world import World, build


@pytest.fixture(scope="module")
def world(planted: dict[str, nn.Module]) -> World:
    return build(planted["honest"], planted["loophole"], 0)


def test_every_guard_passes_on_a_sound_world(world: World) -> None:
    assert failing(judge(world)) == []


ONE_OF_EACH_KIND = (
    "drop-the-hint",
    "shift-the-mask",
    "negate-v",
    "invert-the-gate",
    "half-base,-all-wrong",
    "one-pair",
)


@pytest.mark.parametrize("fault", few(FAULTS, ONE_OF_EACH_KIND, lambda fault: fault.name.replace(" ", "-")))
def test_every_fault_makes_its_guard_fail_and_no_other(fault: Fault, world: World) -> None:
    assert failing(judge(fault.inject(world))) == [fault.guard]


def test_every_guard_has_a_fault() -> None:
    assert {guard.name for guard in GUARDS} == {fault.guard for fault in FAULTS}
