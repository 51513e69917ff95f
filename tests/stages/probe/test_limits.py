"""Limits of memory, tokens of a pass and checkpointing, change results by no more than rounding."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.policy.base import PolicyConfig
from stages.probe import extract_vhack, grpo
from stages.probe.adapters.antipasto import Antipasto
from stages.probe.directions.drift import weight_direction
from stages.probe.directions.pair_gradients import pair_rows
from stages.probe.directions.v_hack import V_HACK_FILE, load_direction
from stages.probe.gradients.student import adapt
from stages.probe.pool.pair_source import PairsConfig
from stages.probe.synthetic.loophole_world import tokenizer
from stages.probe.synthetic.world import spectrum_of
from stages.runs.artifact import Run
from stages.runs.probe_records import TRAJECTORY
from tests.stages.probe.running import HINTED, PLAIN, PLANTED, carry_out

Models, Chain = dict[str, PolicyConfig], dict[str, Run]
SPARE = {"max_tokens": 32, "checkpointing": True}


def test_a_direction_is_the_same(chain: Chain, models: Models, tmp_path: Path) -> None:
    config = extract_vhack.Config(student=models["honest"], pairs=PairsConfig(source="planted"), **SPARE)
    spare = carry_out(extract_vhack, [chain["svd"]], config, tmp_path / "v")
    found, expected = (load_direction(run.folder() / V_HACK_FILE)[0] for run in (spare, chain["v"]))
    assert torch.allclose(found.unit, expected.unit, atol=1e-4)
    assert spare.manifest.summary["verdict"] == chain["v"].manifest.summary["verdict"]


def test_a_trajectory_is_the_same(chain: Chain, models: Models, tmp_path: Path) -> None:
    size = {"seeds": [0], "steps": 2, "problems": 4, "samples": 4, "eval_problems": 4, "alpha": 0.75}
    given = {"env": PLANTED, "options": HINTED, "plain_options": PLAIN, "student": models["honest"]}
    plain, spare = (
        carry_out(
            grpo,
            [chain["v"], chain["svd"]],
            grpo.Config(arm="projected", teacher=models["loophole"], **given, **size, **limits),
            tmp_path / name,
        ).rows(TRAJECTORY)
        for name, limits in (("plain", {}), ("spare", SPARE))
    )
    for one, other in zip(plain, spare, strict=True):
        assert one["hack_rate_student"] == other["hack_rate_student"]
        assert other["delta_norm"] == pytest.approx(one["delta_norm"], rel=1e-3)
        assert other["cos_in"] == pytest.approx(one["cos_in"], abs=1e-4)


def test_a_direction_of_weights_is_the_same(planted: dict[str, nn.Module], chain: Chain) -> None:
    model = copy.deepcopy(planted["honest"])
    student = adapt(model, tokenizer(), Antipasto(spectrum_of(model)))
    pairs = pair_rows(chain["v"].folder())
    whole = weight_direction(student, pairs)
    student.max_tokens = 32
    for name, part in weight_direction(student, pairs).items():
        assert torch.allclose(part, whole[name], atol=1e-5 * float(whole[name].abs().max()) + 1e-7)
