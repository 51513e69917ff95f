"""Rollouts are read back one after the other, with and without steps, and steps that lie elsewhere are refused."""

from pathlib import Path

import pytest
from support.runs import written

from stages.errors import BadInput
from stages.rollouts.trace import rollout_rows
from stages.runs.artifact import Run
from stages.runs.records import ROLLOUT, STEP


def run(folder: Path, rollouts: list[str], steps: list[tuple[str, int]]) -> Run:
    rows = [{"rollout_id": name} for name in rollouts], [{"rollout_id": name, "step": step} for name, step in steps]
    return Run(written(folder, "collect/run", list(zip((ROLLOUT, STEP), rows, strict=True))))


def test_each_rollout_comes_with_its_steps_in_order(tmp_path: Path) -> None:
    found = rollout_rows(run(tmp_path, ["b", "none", "a", "last"], [("b", 1), ("b", 0), ("a", 0)]))
    assert [(rollout["rollout_id"], [step["step"] for step in steps]) for rollout, steps in found] == [
        ("b", [0, 1]),
        ("none", []),
        ("a", [0]),
        ("last", []),
    ]


@pytest.mark.parametrize("steps", [[("a", 0), ("b", 0)], [("b", 0), ("a", 0), ("b", 1)], [("stranger", 0)]])
def test_steps_in_another_order_than_the_rollouts_are_refused(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    with pytest.raises(BadInput, match="do not lie in the order of the rollouts"):
        list(rollout_rows(run(tmp_path, ["b", "a"], steps)))
