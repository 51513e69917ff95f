"""What was taken out of training stands in the evaluation: the three arms' rates, and v's differences from both."""

import json
import re
from dataclasses import asdict

import pytest

from stages.envs.base import SamplingUnit
from stages.evaluation.projected import projected
from stages.policy.adapters import CheckpointInfo
from stages.policy.base import PolicyConfig


def infos(**taken: str | None) -> list[CheckpointInfo]:
    facts = {"start": PolicyConfig(model="m"), "start_identity": "s", "env": "kata", "split": "train", "task_ids": ()}
    return [
        CheckpointInfo(arm=arm, train_seed=seed, projected=what, **facts)
        for arm, what in taken.items()
        for seed in (0, 1, 2)
    ]


def items(hacks: dict[str, int], right: dict[str, int], tasks: int = 60) -> list[dict[str, object]]:
    """Of each arm and seed, so many tasks hacked and so many right, spread over families of four."""
    return [
        {
            "arm": arm,
            "train_seed": seed,
            "task_id": f"t{task}",
            "family": f"f{task % (tasks // 4)}",
            "sample_idx": 0,
            "passed": True,
            "hacked": task < hacks[arm],
            "gt_pass": task >= tasks - right[arm] if arm in right else None,
            "error_type": None,
        }
        for arm in hacks
        for seed in (0, 1, 2)
        for task in range(tasks)
    ]


def test_rates_with_intervals_and_differences_from_both_controls() -> None:
    rows = items({"plain": 30, "out": 3, "chance": 28, "start": 2}, {"plain": 48, "out": 50, "chance": 47, "start": 40})
    found = projected(rows, infos(out="v", chance="random", plain=None), SamplingUnit())
    assert found is not None
    assert [(a.taken_out, a.arm) for a in found.arms] == [
        ("not trained", "start"),
        ("nothing", "plain"),
        ("v", "out"),
        ("a random direction", "chance"),
    ]
    assert [a.hacks.rate for a in found.arms] == pytest.approx([2 / 60, 0.5, 0.05, 28 / 60])
    assert [a.right.rate for a in found.arms] == pytest.approx([40 / 60, 0.8, 50 / 60, 47 / 60])
    assert all(a.hacks.low < a.hacks.rate < a.hacks.high for a in found.arms)
    told = {(e.rate, e.arm, e.other): e.difference for e in found.effects}
    assert told.keys() == {(rate, "out", other) for rate in ("hacks", "right") for other in ("plain", "chance")}
    assert told["hacks", "out", "plain"].estimate == pytest.approx(-0.45) and told["hacks", "out", "plain"].high < 0
    assert told["right", "out", "chance"].estimate == pytest.approx(0.05)
    text = found.text()
    assert re.search(r"^v +out +5\.0 % \[", text, re.MULTILINE) and "hacks, out - chance: -41.7 points" in text
    json.dumps(asdict(found), allow_nan=False)


def test_what_the_environment_cannot_tell_is_left_open() -> None:
    found = projected(items({"plain": 30, "out": 3}, {}), infos(plain=None, out="v"), SamplingUnit(fixed=True))
    assert found is not None and found.arms[1].right.rate is None
    assert {effect.rate for effect in found.effects} == {"hacks"}
    assert found.text().splitlines()[2].endswith("-")


def test_arms_of_which_none_lacks_v_are_not_compared() -> None:
    rows = items({"plain": 30, "chance": 28}, {})
    assert projected(rows, infos(plain=None, chance="random"), SamplingUnit()) is None
