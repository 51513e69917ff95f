"""The replay: it goes on where it was left, its options change what they should, rewards do not reach its gradients."""

from pathlib import Path

import pytest
import torch

from composer_stages.gradients.tensors import GradientStore
from composer_stages.policy.base import PolicyConfig
from composer_stages.probe import svd
from composer_stages.probe.settings import DescentConfig
from composer_stages.runs import store
from composer_stages.runs.kinds import POOL_ROW, PROBE_ROW, VECTORS
from composer_stages.runs.run import Run, RunWriter, write_manifest
from tests.stages.probe.running import carry_out, extracted, pooled, replayed

Models, Chain = dict[str, PolicyConfig], dict[str, Run]


@pytest.fixture(scope="module")
def small(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pooled(models, tmp_path_factory.mktemp("small") / "pool", problems=9)


@pytest.fixture(scope="module")
def plain(small: Run, chain: Chain, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps."""
    return replayed(models, [small, chain["v"], chain["svd"]], tmp_path_factory.mktemp("plain") / "run", steps=3)


def gradients(run: Run) -> torch.Tensor:
    return GradientStore(run.folder(VECTORS)).rows


def test_an_interrupted_replay_ends_as_an_uninterrupted_one(
    small: Run, chain: Chain, models: Models, tmp_path: Path
) -> None:
    given, settings = [small, chain["v"], chain["svd"]], {"arm": "projected", "steps": 6}
    whole = replayed(models, given, tmp_path / "whole", **settings)
    assert replayed(models, given, tmp_path / "parted", stop_at=("steps", 3), **settings) is None
    assert not (tmp_path / "parted" / "step_004.jsonl.gz").exists()
    parted = replayed(models, given, tmp_path / "parted", **settings)
    assert parted.rows(PROBE_ROW) == whole.rows(PROBE_ROW)
    assert torch.equal(gradients(parted), gradients(whole))
    assert parted.manifest.content == whole.manifest.content


def test_rewards_do_not_reach_the_gradients(
    small: Run, plain: Run, chain: Chain, models: Models, tmp_path: Path
) -> None:
    """Equal rewards everywhere, so every group's advantage is zero: each row is measured all the same."""
    rows = [row | {"reward": 1.0} for row in small.rows(POOL_ROW)]
    constant = _rewritten(small, rows, tmp_path / "constant-pool")
    flat = replayed(models, [constant, chain["v"], chain["svd"]], tmp_path / "flat", steps=3)
    assert torch.equal(gradients(flat), gradients(plain))
    assert all(row["null_reason"] is None for row in flat.rows(PROBE_ROW))


def _rewritten(run: Run, rows: list[dict[str, object]], folder: Path) -> Run:
    record = run.manifest.model_copy(deep=True, update={"files": {}})  # those of the other run are not here
    out = RunWriter(folder, record, cache=folder)
    out.table(POOL_ROW, rows)
    write_manifest(folder, record)
    return Run(folder)


def test_half_precision_checkpointing_and_small_batches_keep_the_gradients(
    small: Run, plain: Run, chain: Chain, models: Models, tmp_path: Path
) -> None:
    spare = {"dtype": "bfloat16", "checkpointing": True, "max_tokens": 64}
    half = replayed(models, [small, chain["v"], chain["svd"]], tmp_path / "half", steps=3, **spare)
    assert gradients(half).dtype == torch.bfloat16
    assert torch.allclose(gradients(half).float(), gradients(plain), rtol=1e-2, atol=1e-3)


def test_project_on_and_first_tokens_are_settings(small: Run, chain: Chain, models: Models, tmp_path: Path) -> None:
    more = {"descent": DescentConfig(project_on="grad"), "first_tokens": 5}  # by default both, and 128
    run = replayed(models, [small, chain["v"], chain["svd"]], tmp_path / "run", arm="two_sided", steps=3, **more)
    step = store.read_json(run.path / "step_002.diag.json")
    assert abs(step["cos_out"]) < 1e-5 < abs(step["cos_upd_out"])
    longer = [row for row in run.rows(PROBE_ROW) if row["comp_len"] > 5]
    assert longer and all(row["cos_first128"] != row["cos_stack"] for row in longer)
    assert all(row["cos_first128"] == row["cos_stack"] for row in run.rows(PROBE_ROW) if row["comp_len"] <= 5)


@pytest.mark.parametrize("adapter", ["lora", "lora_frozenA"])
def test_lora_arms_probe_b_and_watch_the_basis(adapter: str, small: Run, models: Models, tmp_path: Path) -> None:
    v = extracted(models["honest"], [], tmp_path / "v", count=8, adapter=adapter, rank=4)
    run = replayed(models, [small, v], tmp_path / "replay", arm="projected", steps=6)
    checks = (run.path / "report.txt").read_text()
    assert "PASS         lora-B" in checks
    assert run.manifest.summary["verdict"] == "PASS"
    assert ("basis" in checks) == (adapter != "lora_frozenA")


def test_an_interrupted_decomposition_goes_on(models: Models, chain: Chain, tmp_path: Path) -> None:
    config = svd.Config(model=models["honest"])
    assert carry_out(svd, [], config, tmp_path / "svd", stop_at=("decompositions", 5)) is None
    again = carry_out(svd, [], config, tmp_path / "svd")
    assert again.manifest.summary["svd_sha256"] == chain["svd"].manifest.summary["svd_sha256"]


def test_an_interrupted_pool_holds_the_rows_of_an_uninterrupted_one(small: Run, models: Models, tmp_path: Path) -> None:
    assert pooled(models, tmp_path / "pool", stop_at=("answers of teacher", 32), problems=9) is None
    assert pooled(models, tmp_path / "pool", problems=9).rows(POOL_ROW) == small.rows(POOL_ROW)
