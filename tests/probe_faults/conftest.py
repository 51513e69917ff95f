"""The two models of the planted world, made once for all tests of a run."""

from tests.stages.probe.conftest import planted

__all__ = ["planted"]
