"""Every column of every record kind of the probe is written by something, and varies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_stages import stages_of
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import uat
from composer_stages.probe.direction import V_HACK_FILE, from_flat, load_direction
from composer_stages.probe.metrics import probe_rows, row_metrics
from composer_stages.probe.rows import as_tokens, recorded_rows
from composer_stages.runs.kinds import (
    DIRECTION,
    PLACEBO,
    POOL_ROW,
    PROBE_CHECK,
    PROBE_ROW,
    PROBE_SCORE,
    ROLLOUT_GRADIENT,
    SVD_MODULE,
    TRAJECTORY,
    VECTORS,
    WATCHED,
    WATCHED_ROLLOUT,
)
from composer_stages.runs.run import Run
from composer_stages.runs.stage import load_stage
from tests.stages.probe.running import carry_out, dead_columns, extracted
from tests.stages.probe.test_rows import EOS, PAD, recorded

ELSEWHERE = {
    *(kind.name for kind in (TRAJECTORY, WATCHED, WATCHED_ROLLOUT)),
    *(f"pool_row.{column}" for column in ("label", "test_mod", "can_compile", "has_test_func", "eq_hinted")),
    *(f"pool_row.{column}" for column in ("hacked_strict", "hacked_loose", "gen_adapter")),
}
"""Kinds that rarer stages write, and columns of labelled answers of an adapter: held by the tests of these stages and
of leetcode-rh."""
Rows = list[dict[str, Any]]


@pytest.fixture
def found(
    chain: dict[str, Run], models: dict[str, PolicyConfig], arms: dict[str, Run], tmp_path: Path
) -> dict[str, Rows]:
    """Rows of each kind: the whole chain, a measured training, and recorded rows."""
    runs = [chain[name] for name in ("pool", "vanilla", "projected", "score", "v")]
    judged = carry_out(uat, runs, uat.Config(), tmp_path / "uat")
    axes = {"method": "svd_k", "k": 2, "noise_floor": 0.7}
    two = extracted(models["honest"], [chain["svd"]], tmp_path / "v2", count=8, adapter="lora_frozenA", rank=4, **axes)
    changes = {"fmt_ok": False, "completion": "# maybe", "completion_ids": [7, 8], "comp_len": 2}
    older = recorded_rows(recorded(tmp_path / "old", **changes), "s65", "rh", EOS, [PAD])
    direction = load_direction(chain["v"].folder(VECTORS) / V_HACK_FILE)[0]
    direction = from_flat(direction.layout, direction.mean, direction.modules[:5])
    row = chain["pool"].rows(POOL_ROW)[0]
    metrics = row_metrics(torch.zeros(1, direction.layout.width), direction)
    [unmeasured] = probe_rows([row], [as_tokens(row)], metrics, [torch.zeros(1)], direction)
    return {
        SVD_MODULE.name: chain["svd"].rows(SVD_MODULE),
        DIRECTION.name: [row for run in (chain["v"], two) for row in run.rows(DIRECTION)],
        POOL_ROW.name: [*chain["pool"].rows(POOL_ROW), *older],
        PROBE_ROW.name: [unmeasured, *chain["vanilla"].rows(PROBE_ROW), *chain["projected"].rows(PROBE_ROW)],
        PROBE_SCORE.name: chain["score"].rows(PROBE_SCORE),
        PLACEBO.name: chain["score"].rows(PLACEBO),
        PROBE_CHECK.name: judged.rows(PROBE_CHECK),
        ROLLOUT_GRADIENT.name: arms["projected"].rows(ROLLOUT_GRADIENT),
    }


def test_every_column_has_a_writer_and_at_least_two_values(found: dict[str, Rows]) -> None:
    written = [kind for stage in stages_of("probe") for kind in load_stage(stage).outputs.values()]
    kinds = {kind.name: kind for kind in (*written, ROLLOUT_GRADIENT) if kind.columns and kind.name not in ELSEWHERE}
    assert found.keys() == kinds.keys()
    dead = {f"{name}.{column}" for name, rows in found.items() for column in dead_columns(kinds[name], rows)}
    carried = {f"probe_row.{column}" for column in POOL_ROW.columns}
    assert dead - carried - ELSEWHERE == set()
