"""Trajectories on the planted world: generators, controls, bail-outs, resumption, and the verdict over arms."""

from pathlib import Path
from typing import Any

import pytest
from probe_faults.loophole_world import WORDS, tiny_qwen3, tokenizer

from stages.errors import UsageError
from stages.policy.base import PolicyConfig
from stages.probe import compare, grpo
from stages.probe.settings import DescentConfig
from stages.runs.kinds import PROBE_CHECK, TRAJECTORY
from stages.runs.run import Run
from tests.stages.probe.running import HINTED, PLAIN, PLANTED, carry_out

Models, Chain = dict[str, PolicyConfig], dict[str, Run]


def config(models: Models, **changes: Any) -> grpo.Config:
    settings = {
        "env": PLANTED,
        "options": HINTED,
        "plain_options": PLAIN,
        "student": models["honest"],
        "teacher": models["loophole"],
        "alpha": 0.75,
        "seeds": [0],
        "steps": 2,
        "problems": 4,
        "samples": 4,
        "eval_problems": 4,
        "descent": DescentConfig(learning_rate=0.02),
    }
    return grpo.Config(**{**settings, **changes})


def run(chain: Chain, settings: grpo.Config, folder: Path, **more: Any) -> Run:
    return carry_out(grpo, [chain["v"], chain["svd"]], settings, folder, **more)


def test_an_interrupted_trajectory_ends_as_an_uninterrupted_one(chain: Chain, models: Models, tmp_path: Path) -> None:
    settings = config(models, arm="projected", seeds=[0, 1], drift_every=2)
    whole = run(chain, settings, tmp_path / "whole")
    assert run(chain, settings, tmp_path / "parted", stop_at=("steps of seed 1", 1)) is None
    assert run(chain, settings, tmp_path / "parted").rows(TRAJECTORY) == whole.rows(TRAJECTORY)
    rows = whole.rows(TRAJECTORY)
    assert [(row["train_seed"], row["step"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    evaluated = [row["eval_solve_rate"] is not None for row in rows]
    assert evaluated == [True, True, False, True]  # the start once for all seeds, each seed where it ends
    assert (whole.path / "seed1" / "step_001.jsonl.gz").exists()


def test_interpolation_is_on_policy_and_records_where(chain: Chain, models: Models, tmp_path: Path) -> None:
    found = run(chain, config(models, alpha=None, steps=1), tmp_path / "interp")
    row = found.rows(TRAJECTORY)[0]
    assert 0 < found.manifest.summary["alpha"] < 1 and abs(found.manifest.summary["cos_with_given"]) < 0.9
    assert row["ess"] > 0.99 and row["clip_low"] == row["clip_high"] == row["vanish"] == 0
    assert row["ratio_p5"] == pytest.approx(1, abs=1e-4) and row["hack_rate_student"] == row["hack_rate_all"]


def test_true_ratios_of_a_foreign_teacher_bail_out(chain: Chain, models: Models, tmp_path: Path) -> None:
    """A teacher that the student would never say: its tokens are clipped or vanish, and the seed is given up."""
    tiny_qwen3(hidden=48, vocab=len(WORDS), seed=9).save_pretrained(tmp_path / "foreign")
    tokenizer().save_pretrained(tmp_path / "foreign")
    foreign = models["loophole"].model_copy(update={"model": str(tmp_path / "foreign")})
    found = run(chain, config(models, generator="mixed_is", teacher=foreign, steps=4), tmp_path / "is")
    rows = found.rows(TRAJECTORY)
    assert len(rows) == 1 and rows[0]["bailed"] and found.manifest.summary["bailed"] == [rows[0]["bailed"]]
    assert rows[0]["clip_low"] + rows[0]["clip_high"] + rows[0]["vanish"] > 0.5 or rows[0]["ess"] < 0.2


def test_true_ratios_take_the_hack_out_of_what_is_learned(chain: Chain, models: Models, tmp_path: Path) -> None:
    rows = run(chain, config(models, generator="mixed_is", steps=1), tmp_path / "is").rows(TRAJECTORY)
    assert rows[0]["hack_rate_student"] < rows[0]["hack_rate_all"]
    assert 0 < rows[0]["clip_low"] + rows[0]["clip_high"] < 1 and rows[0]["ess"] < 1


def test_ratio_one_on_teacher_rows_goes_on_as_imitation(chain: Chain, models: Models, tmp_path: Path) -> None:
    rows = run(chain, config(models, generator="mixed_awr"), tmp_path / "awr").rows(TRAJECTORY)
    assert len(rows) == 2 and not any(row["bailed"] for row in rows)
    assert rows[0]["corr_advantage_source"] is not None


def test_teacher_off_is_the_student_alone(chain: Chain, models: Models, tmp_path: Path) -> None:
    rows = run(chain, config(models, generator="mixed_awr", arm="teacher_off", steps=1), tmp_path / "off").rows(
        TRAJECTORY
    )
    assert rows[0]["hack_rate_student"] == rows[0]["hack_rate_all"] == 0


def test_a_seed_is_given_up_after_three_steps_without_reward_variance(
    chain: Chain, models: Models, tmp_path: Path
) -> None:
    env = {"name": "tests.stages.probe.running:FlatEnv"}
    found = run(chain, config(models, generator="pi_theta", steps=6, samples=2, env=env), tmp_path / "flat")
    assert [row["zero_variance_groups"] for row in found.rows(TRAJECTORY)] == [4, 4, 4]
    assert [row["eval_solve_rate"] is not None for row in found.rows(TRAJECTORY)] == [True, False, True]
    assert "FAIL         variance" in (found.path / "report.txt").read_text()


def test_a_temperature_other_than_one_is_refused(chain: Chain, models: Models, tmp_path: Path) -> None:
    student = models["honest"].model_copy(update={"temperature": 0.7})
    with pytest.raises(UsageError, match="temperature 1"):
        run(chain, config(models, student=student), tmp_path / "cold")


def test_compare_judges_the_trajectories_that_it_is_given(chain: Chain, models: Models, tmp_path: Path) -> None:
    arms = [run(chain, config(models, arm=arm), tmp_path / arm) for arm in ("vanilla", "projected", "projected_random")]
    found = carry_out(compare, arms, compare.Config(), tmp_path / "compare")
    assert found.rows(PROBE_CHECK)[0]["status"] == "INCONCLUSIVE" and found.manifest.outcome.exit_code == 3
