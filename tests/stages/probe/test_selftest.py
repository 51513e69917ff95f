"""The self-test on a sound world."""

from pathlib import Path

from torch import nn

from stages.probe import selftest
from stages.probe.synthetic.faults import FAULTS
from stages.probe.synthetic.guard_checks import GUARDS
from stages.probe.synthetic.world import build
from stages.runs import manifest
from stages.runs.artifact import RunWriter


def test_the_selftest_passes_on_a_sound_world(planted: dict[str, nn.Module], tmp_path: Path) -> None:
    world = build(planted["honest"], planted["loophole"], 0)
    record = manifest.Manifest(composer="test", stage="selftest", stage_version=1, fingerprint="0" * 64)
    out = RunWriter(tmp_path / "run", record, cache=tmp_path)
    selftest.judge_world(world, out)
    assert record.summary["verdict"] == "PASS" and record.counts == {"guards": len(GUARDS), "faults": len(FAULTS)}
