"""Every column of every record kind of the probe is written by something, and varies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe_faults.loophole_world import WORDS, tiny_qwen3, tokenizer

from stages import train
from stages.policy.base import PolicyConfig
from stages.probe import compare, uat, watch
from stages.probe.direction import V_HACK_FILE, from_flat, load_direction
from stages.probe.metrics import probe_rows, row_metrics
from stages.probe.rows import as_tokens, recorded_rows
from stages.runs.kinds import (
    DIRECTION,
    PLACEBO,
    POOL_ROW,
    PROBE_CHECK,
    PROBE_KINDS,
    PROBE_ROW,
    PROBE_SCORE,
    ROLLOUT_GRADIENT,
    SVD_MODULE,
    TRAJECTORY,
    WATCHED,
    WATCHED_ROLLOUT,
)
from stages.runs.run import Run
from tests.stages.envs.leetcode_rh.conftest import folder
from tests.stages.probe.running import carry_out, extracted, settings
from tests.stages.probe.test_labels import rows as leetcode_rows
from tests.stages.probe.test_rows import EOS, PAD, recorded

__all__ = ["folder", "leetcode_rows"]
Rows = list[dict[str, Any]]


@pytest.fixture
def found(
    chain: dict[str, Run],
    models: dict[str, PolicyConfig],
    leetcode_rows: Rows,
    trained: dict[str, Run],
    compared: dict[str, Run],
    watched: Run,
    tmp_path: Path,
) -> dict[str, Rows]:
    """Rows of each kind: the whole chain, two trainings, two watches, recorded rows and leetcode-rh answers."""
    judged = carry_out(
        uat, [chain[name] for name in ("pool", "vanilla", "projected", "score", "v")], uat.Config(), tmp_path / "uat"
    )
    axes = {"method": "svd_k", "k": 2, "noise_floor": 0.7}
    two = extracted(models["honest"], [chain["svd"]], tmp_path / "v2", count=8, adapter="lora_frozenA", rank=4, **axes)
    tiny_qwen3(hidden=48, vocab=len(WORDS), seed=7).save_pretrained(tmp_path / "foreign")
    tokenizer().save_pretrained(tmp_path / "foreign")
    foreign = models["loophole"].model_copy(update={"model": str(tmp_path / "foreign")})
    mixed = {
        "A": {"teacher": foreign, "adapter": {"rank": 2}, "optimisation": {"prompts_per_step": 3}, "tasks": 3},
        "C": {"teacher": models["loophole"], "seed": 1},
    }
    arms = [
        carry_out(
            train, [], settings(models["honest"], 2, 0.05, arm=arm, probe={"mixed": "ratio"}, **more), tmp_path / arm
        )
        for arm, more in mixed.items()
    ]
    trajectories = carry_out(compare, arms, compare.Config(), tmp_path / "compare").rows(TRAJECTORY)
    changes = {"fmt_ok": False, "completion": "# maybe", "completion_ids": [7, 8], "comp_len": 2}
    older = recorded_rows(recorded(tmp_path / "old", **changes), "s65", "rh", EOS, [PAD])
    other_watch = carry_out(watch, list(trained.values()), watch.Config(placebos=50, seed=1), tmp_path / "watch")
    direction = load_direction(chain["v"].folder() / V_HACK_FILE)[0]
    direction = from_flat(direction.layout, direction.mean, direction.modules[:5])
    row = chain["pool"].rows(POOL_ROW)[0]
    unmeasured = probe_rows(
        [row],
        [as_tokens(row)],
        row_metrics(torch.zeros(1, direction.layout.width), direction),
        [torch.zeros(1)],
        direction,
    )[0]
    return {
        SVD_MODULE.name: chain["svd"].rows(SVD_MODULE),
        DIRECTION.name: [row for run in (chain["v"], two) for row in run.rows(DIRECTION)],
        POOL_ROW.name: [*chain["pool"].rows(POOL_ROW), *older, *leetcode_rows],
        PROBE_ROW.name: [unmeasured, *chain["vanilla"].rows(PROBE_ROW), *chain["projected"].rows(PROBE_ROW)],
        PROBE_SCORE.name: chain["score"].rows(PROBE_SCORE),
        PLACEBO.name: chain["score"].rows(PLACEBO),
        PROBE_CHECK.name: judged.rows(PROBE_CHECK),
        TRAJECTORY.name: [*trajectories, *compared["compare"].rows(TRAJECTORY)],
        ROLLOUT_GRADIENT.name: compared["projected"].rows(ROLLOUT_GRADIENT),
        WATCHED.name: [row for run in (watched, other_watch) for row in run.rows(WATCHED)],
        WATCHED_ROLLOUT.name: watched.rows(WATCHED_ROLLOUT),
    }


def test_every_column_has_a_writer_and_at_least_two_values(found: dict[str, Rows]) -> None:
    kinds = {kind.name: kind for kind in PROBE_KINDS}
    assert found.keys() == kinds.keys()
    dead = [
        f"{name}.{column}"
        for name, rows in found.items()
        for column in kinds[name].columns
        if len({repr(row[column]) for row in rows}) < 2
    ]
    carried = {f"probe_row.{column}" for column in POOL_ROW.columns}
    assert not (left := sorted(name for name in dead if name not in carried)), " ".join(left)
