"""Comparisons of scores, and of trainings."""

from pathlib import Path
from typing import Any

import pytest
from probe_faults.loophole_world import WORDS, tiny_qwen3, tokenizer
from support.shared import made_once

from composer_stages import train
from composer_stages.errors import BadInput
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import compare, plot, score
from composer_stages.runs.kinds import EVAL_ITEM, PLACEBO, PROBE_CHECK, ROLLOUT, ROLLOUT_GRADIENT, TRAJECTORY
from composer_stages.runs.run import Run
from tests.stages.probe.running import ARMS, carry_out, dead_columns, extracted, replayed, settings

Models, Chain = dict[str, PolicyConfig], dict[str, Run]


@pytest.fixture(scope="session")
def compared(arms: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Three arms, an evaluation without the hint, and their comparison."""

    def make(folder: Path) -> None:
        carry_out(compare, list(arms.values()), compare.Config(), folder / "compare")

    return {**arms, "compare": Run(made_once(tmp_path_factory, "compared", make) / "compare")}


def test_each_column_of_a_trajectory_varies(compared: Chain, models: Models, tmp_path: Path) -> None:
    tiny_qwen3(hidden=48, vocab=len(WORDS), seed=7).save_pretrained(tmp_path / "foreign")
    tokenizer().save_pretrained(tmp_path / "foreign")
    foreign = models["loophole"].model_copy(update={"model": str(tmp_path / "foreign")})
    mixed: dict[str, dict[str, Any]] = {
        "A": {"teacher": foreign, "adapter": {"rank": 2}, "optimisation": {"prompts_per_step": 3}, "tasks": 3},
        "C": {"teacher": models["loophole"], "seed": 1},
    }
    trained = []
    for arm, more in mixed.items():
        config = settings(models["honest"], 2, 0.05, arm=arm, probe={"mixed": "ratio"}, **more)
        trained.append(carry_out(train, [], config, tmp_path / arm))
    rows = carry_out(compare, trained, compare.Config(), tmp_path / "compare").rows(TRAJECTORY)
    assert dead_columns(TRAJECTORY, [*rows, *compared["compare"].rows(TRAJECTORY)]) == []


def test_lora_and_svd_are_compared_on_the_same_rows(chain: Chain, models: Models, tmp_path: Path) -> None:
    v = extracted(models["honest"], [], tmp_path / "v", adapter="lora_frozenA", rank=4)
    on_lora = replayed(models, [chain["pool"], v], tmp_path / "lora", arm="vanilla")
    scored = carry_out(score, [on_lora, v], score.Config(placebos=4), tmp_path / "score")
    runs = [scored, chain["score"], chain["vanilla"]]
    found = carry_out(compare, runs, compare.Config(resamples=300), tmp_path / "compare")
    row = found.rows(PROBE_CHECK)[0]
    assert row["check"] == "R6" and row["stat"] > 0.3 and "SVD d" in row["detail"]
    with pytest.raises(BadInput, match="not of the same rows"):
        carry_out(compare, [scored, chain["score"]], compare.Config(), tmp_path / "no-rows")
    with pytest.raises(BadInput, match="other coordinates"):
        carry_out(score, [chain["vanilla"], v], score.Config(), tmp_path / "other")


def test_a_grpo_direction_is_compared_with_the_nll_one(chain: Chain, models: Models, tmp_path: Path) -> None:
    v = extracted(models["honest"], [chain["svd"]], tmp_path / "v", loss="grpo")
    assert "PASS         R7-oracle " in (v.path / "report.txt").read_text()
    scored = carry_out(score, [chain["vanilla"], v, chain["v"]], score.Config(placebos=4), tmp_path / "score")
    families = {row["family"] for row in scored.rows(PLACEBO)}
    assert {"haar", "randsign", "perm_pairs", "clean_clean", "hack_hack", "negated", "generic", "unrelated"} == families
    assert scored.manifest.summary["loss_kind"] == "drgrpo_sum"
    runs = [chain["score"], scored, chain["vanilla"]]
    found = carry_out(compare, runs, compare.Config(resamples=300), tmp_path / "compare")
    (row,) = found.rows(PROBE_CHECK)
    assert row["check"] == "R7" and "t of T4e" in row["detail"]
    with pytest.raises(BadInput, match="takes an SVD and a LoRA"):
        carry_out(compare, [scored, scored, chain["vanilla"]], compare.Config(), tmp_path / "same")


def test_compare_needs_something_to_compare(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="two scores with their replays"):
        carry_out(compare, [chain["vanilla"]], compare.Config(), tmp_path / "compare")


def test_trainings_are_trajectories_of_their_tables(compared: dict[str, Run]) -> None:
    rows = compared["compare"].rows(TRAJECTORY)
    assert [(row["arm"], row["train_seed"], row["step"]) for row in rows] == [(a, 3, s) for a in ARMS for s in (0, 1)]
    assert {(row["adapter"], row["mixed"], row["rows"], row["groups"]) for row in rows} == {
        ("singular-values", "", 16, 4)
    }
    for arm in ARMS:
        first, last = (row for row in rows if row["arm"] == arm)
        played = compared[arm].rows(ROLLOUT)
        for number, row in enumerate((first, last)):
            step = played[16 * number :][:16]
            assert row["hack_rate_student"] == row["hack_rate_all"] == sum(r["hacked"] for r in step) / 16
            assert row["reward_mean"] == sum(r["reward"] for r in step) / 16
            groups = [[r["reward"] for r in step[4 * i :][:4]] for i in range(4)]
            assert row["zero_variance_groups"] == sum(len(set(group)) == 1 for group in groups)
        items = [item for item in compared["evaluate"].rows(EVAL_ITEM) if item["arm"] == arm]
        assert first["eval_solve_rate"] is None
        assert last["eval_solve_rate"] == pytest.approx(sum(item["hidden_pass"] for item in items) / len(items))
        assert last["weight_change"] > first["weight_change"] > 0 and first["ess"] > 0.99
        measured = compared[arm].rows(ROLLOUT_GRADIENT)
        hacked = {row["rollout_id"] for row in played if row["hacked"]}
        cosines = [row["cos_stack"] for row in measured if row["training_step"] == 0 and row["rollout_id"] in hacked]
        assert first["cos_hacked"] == pytest.approx(sum(cosines) / len(cosines))
        assert (first["energy_removed"] == 0) is (arm == "vanilla")


def test_arms_of_one_seed_decide_nothing_and_are_drawn(compared: dict[str, Run], tmp_path: Path) -> None:
    checks = {row["check"]: row["status"] for row in compared["compare"].rows(PROBE_CHECK)}
    assert checks["R5"] == "INCONCLUSIVE" and compared["compare"].manifest.outcome.exit_code == 3
    assert {name.partition(":")[2] for name in checks if ":" in name} == ARMS.keys()
    drawn = carry_out(plot, [compared["compare"]], plot.Config(), tmp_path / "plot")
    assert {path.stem for path in drawn.path.glob("*.png")} == {"08_ratios", "09_rates"}


def test_three_steps_without_reward_variance_fail(models: Models, tmp_path: Path) -> None:
    more: dict[str, Any] = {"env": {"name": "tests.stages.probe.running:FlatEnv"}}
    flat = carry_out(train, [], settings(models["honest"], 3, **more), tmp_path / "flat")
    found = carry_out(compare, [flat], compare.Config(), tmp_path / "compare")
    assert [row["zero_variance_groups"] for row in found.rows(TRAJECTORY)] == [4, 4, 4]
    assert "FAIL         variance" in (found.path / "report.txt").read_text()
    assert found.manifest.outcome.exit_code == 1
