"""Comparisons of scores."""

from pathlib import Path

import pytest
from probe_faults.loophole_world import PAIR_SOURCE

from stages.errors import BadInput
from stages.policy.base import PolicyConfig
from stages.probe import compare, extract_vhack, replay, score
from stages.probe.extract_vhack import PairsConfig
from stages.runs.kinds import PROBE_CHECK
from stages.runs.run import Run
from tests.stages.probe.running import carry_out

Models, Chain = dict[str, PolicyConfig], dict[str, Run]


def test_lora_and_svd_are_compared_on_the_same_rows(chain: Chain, models: Models, tmp_path: Path) -> None:
    config = extract_vhack.Config(
        student=models["honest"],
        pairs=PairsConfig(source=PAIR_SOURCE),
        adapter="lora_frozenA",
        rank=4,
    )
    v = carry_out(extract_vhack, [], config, tmp_path / "v")
    replayed = carry_out(
        replay, [chain["pool"], v], replay.Config(arm="vanilla", student=models["honest"]), tmp_path / "lora"
    )
    scored = carry_out(score, [replayed, v], score.Config(placebos=4), tmp_path / "score")
    found = carry_out(
        compare, [scored, chain["score"], chain["vanilla"]], compare.Config(resamples=300), tmp_path / "compare"
    )
    row = found.rows(PROBE_CHECK)[0]
    assert row["check"] == "R6" and row["stat"] > 0.3 and "SVD d" in row["detail"]
    with pytest.raises(BadInput, match="not of the same rows"):
        carry_out(compare, [scored, chain["score"]], compare.Config(), tmp_path / "no-rows")


def test_a_grpo_direction_is_compared_with_the_nll_one(chain: Chain, models: Models, tmp_path: Path) -> None:
    config = extract_vhack.Config(student=models["honest"], pairs=PairsConfig(source=PAIR_SOURCE), loss="grpo")
    v = carry_out(extract_vhack, [chain["svd"]], config, tmp_path / "v")
    assert "PASS         R7-oracle " in (v.path / "report.txt").read_text()
    scored = carry_out(score, [chain["vanilla"], v], score.Config(placebos=4), tmp_path / "score")
    found = carry_out(
        compare, [chain["score"], scored, chain["vanilla"]], compare.Config(resamples=300), tmp_path / "compare"
    )
    (row,) = found.rows(PROBE_CHECK)
    assert row["check"] == "R7" and "t of T4e" in row["detail"]
    with pytest.raises(BadInput, match="takes an SVD and a LoRA"):
        carry_out(compare, [scored, scored, chain["vanilla"]], compare.Config(), tmp_path / "same")


def test_compare_needs_something_to_compare(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="two scores with their replays"):
        carry_out(compare, [chain["vanilla"]], compare.Config(), tmp_path / "compare")
