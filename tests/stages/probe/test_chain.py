"""The chain of sub-stages on the planted world: what it finds, what it must not find, what it refuses."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from composer_stages.errors import BadInput, UsageError
from composer_stages.gradients.basis import load_spectrum
from composer_stages.gradients.tensors import GradientStore
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import score, uat
from composer_stages.probe.checks.hacking import scored_rows
from composer_stages.runs import store
from composer_stages.runs.kinds import (
    DIRECTION,
    PLACEBO,
    POOL_ROW,
    PROBE_CHECK,
    PROBE_ROW,
    PROBE_SCORE,
    SVD_MODULE,
    VECTORS,
)
from composer_stages.runs.run import Run
from tests.stages.probe.running import carry_out, extracted, pooled, replayed

LEGACY = {
    *("step", "sample_id", "reward", "hacked", "hidden_pass", "fmt_ok", "comp_len", "cos_S_contrib"),
    *("mean_cos_pre", "mean_cos_post", "frac_fired", "arm", "src_pool", "src_problem_id", "logp_mean"),
    *("per_sample_loss", "imp_ratio", "delta_S_norm", "problem_id", "problem_messages", "prompt", "plen"),
    *("prompt_ids", "completion_ids", "completion", "grad_norm_contrib"),
}
Models, Chain = dict[str, PolicyConfig], dict[str, Run]


def checks(run: Run) -> dict[str, dict[str, object]]:
    return {row["check"]: row for row in run.rows(PROBE_CHECK)}


@pytest.fixture(scope="session")
def judged(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = [chain[name] for name in ("pool", "vanilla", "projected", "projected_random", "score", "v")]
    return carry_out(uat, runs, uat.Config(), tmp_path_factory.mktemp("uat") / "run")


def test_the_planted_hack_is_found(judged: Run) -> None:
    found = checks(judged)
    assert found["T4e"]["status"] == "PASS" and found["T4e"]["stat"] > found["T4e"]["placebo_q95"]
    assert {found[name]["status"] for name in ("T1", "T2", "T3", "fires", "generic", "specific", "contract")} == {
        "PASS"
    }
    assert judged.manifest.outcome.exit_code == 0


def test_the_plans_own_contrasts_are_reported_and_decide_nothing(judged: Run) -> None:
    found = checks(judged)
    assert {found[name]["severity"] for name in ("T4a", "T4b", "T4c", "T4d")} == {"report"}
    assert found["T4a"]["status"] == "FAIL"


def test_uat_json_and_report_agree(judged: Run) -> None:
    document = store.read_json(judged.path / "uat.json")
    assert {"check", "plan_item", "stat", "threshold", "pass", "evidence_path", "severity"} <= document[0].keys()
    report = (judged.path / "report.txt").read_text()
    assert report.index("hack+wrong") < report.index("T4a")
    assert all(item["check"] in report for item in document) and report.rstrip().endswith("Verdict: PASS")


@pytest.mark.slow
def test_a_model_without_the_loophole_does_not_pass(models: Models, chain: Chain, tmp_path: Path) -> None:
    honest, v = dict.fromkeys(models, models["honest"]), chain["v"]
    pool = pooled(honest, tmp_path / "pool")
    vanilla = replayed(honest, [pool, v, chain["svd"]], tmp_path / "vanilla")
    scored = carry_out(score, [vanilla, v], score.Config(), tmp_path / "score")
    run = carry_out(uat, [pool, vanilla, scored, v], uat.Config(), tmp_path / "uat")
    assert checks(run)["T1"]["status"] == "FAIL" and checks(run)["T4e"]["status"] == "INCONCLUSIVE"
    assert run.manifest.outcome.exit_code == 1


def test_too_few_problems_are_inconclusive(models: Models, chain: Chain, tmp_path: Path) -> None:
    pool = pooled(models, tmp_path / "pool", problems=4)
    assert pool.manifest.summary["verdict"] == "INCONCLUSIVE" and pool.manifest.outcome.exit_code == 3


def test_the_pool_grows_until_its_buckets_are_filled(models: Models, tmp_path: Path) -> None:
    pool = pooled(models, tmp_path / "pool", problems=6, max_problems=40)
    assert 6 < pool.manifest.counts["problems"] <= 40
    assert "problems with both" not in pool.rows(POOL_ROW)[0]["completion"]
    assert pool.manifest.summary["verdict"] == "INCONCLUSIVE", "so few problems show no rate"


def test_rows_hold_the_older_keys_and_every_gradient_is_kept(chain: Chain) -> None:
    rows = chain["vanilla"].rows(PROBE_ROW)
    assert rows[0].keys() >= LEGACY
    with gzip.open(chain["vanilla"].path / "step_000.jsonl.gz") as file:
        first = json.loads(file.readline(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert first["row_uid"] == rows[0]["row_uid"] and first["cos_stack"] == rows[0]["cos_stack"]
    kept = GradientStore(chain["vanilla"].folder(VECTORS))
    assert len(kept.rows) == len(rows) == len({row["grad_store_offset"] for row in rows})
    assert all(row["comp_len"] == row["n_loss_tokens"] == len(row["completion_ids"]) for row in rows)
    norms = (kept.rows.norm(dim=-1) / torch.tensor([float(row["n_loss_tokens"]) for row in rows])).tolist()
    assert norms == pytest.approx([row["grad_norm_contrib"] for row in rows], rel=1e-4)


def test_scores_of_stored_gradients_are_those_measured_with_the_model(chain: Chain) -> None:
    measured = [row["cos_stack"] for row in chain["vanilla"].rows(PROBE_ROW)]
    offline = [row["cos_stack"] for row in chain["score"].rows(PROBE_SCORE)]
    assert offline == pytest.approx(measured, abs=1e-6)


def test_a_direction_has_module_rows_and_passes_validation(chain: Chain) -> None:
    rows = chain["v"].rows(DIRECTION)
    assert len(rows) == 14 and all(row["axes"] == 1 and row["signal_to_noise"] > 1 for row in rows)
    checks = {item["check"]: item["status"] for item in store.read_json(chain["v"].path / "validation.json")}
    assert checks == dict.fromkeys(("V1", "V2", "V3", "V4", "V5", "V6", "signal"), "PASS")


def test_a_decomposition_has_its_digest_in_the_summary(chain: Chain) -> None:
    assert load_spectrum(chain["svd"].folder(VECTORS)).sha256 == chain["svd"].manifest.summary["svd_sha256"]
    assert [row["rank"] for row in chain["svd"].rows(SVD_MODULE)][:3] == [48, 24, 24]


def test_another_models_decomposition_is_refused(chain: Chain, models: Models, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not of this model's weights"):
        extracted(models["loophole"], [chain["svd"]], tmp_path / "v")


def test_more_steps_than_problems_are_refused(chain: Chain, models: Models, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="60 problems"):
        replayed(models, [chain["pool"], chain["v"], chain["svd"]], tmp_path / "long", steps=61)


def test_uat_needs_the_vanilla_replay_and_its_scores(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="one vanilla replay"):
        carry_out(uat, [chain[n] for n in ("pool", "projected", "score", "v")], uat.Config(), tmp_path / "uat")
    foreign = carry_out(score, [chain["projected"], chain["v"]], score.Config(placebos=2), tmp_path / "score")
    rows, scores = chain["vanilla"].rows(PROBE_ROW), foreign.rows(PROBE_SCORE)
    with pytest.raises(BadInput, match="not those of the vanilla replay"):
        scored_rows(rows[1:], scores, foreign.rows(PLACEBO))


def test_a_replay_of_other_prompts_fails_the_uat(chain: Chain, models: Models, tmp_path: Path) -> None:
    pool = pooled(models, tmp_path / "pool", problems=2, contract={})
    runs = [pool, *(chain[name] for name in ("vanilla", "score", "v"))]
    assert checks(carry_out(uat, runs, uat.Config(), tmp_path / "uat"))["contract"]["status"] == "FAIL"
