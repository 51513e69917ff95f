"""The Python interface does what the command line does: the same run, the same sentences."""

import shutil
from pathlib import Path

import pytest
from support.command_line import TEACHERS

from composer_cli import api
from stages import stages_of


def test_every_stage_of_the_pipeline_has_its_function() -> None:
    for stage in stages_of("pipeline"):
        function = getattr(api, stage.replace("-", "_"))
        assert function.name == stage and function.__doc__ and f"composer {stage}" in repr(function)
    assert set(api.__all__) <= set(dir(api))


def test_a_run_of_the_command_line_is_found_done(made: Path, server: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(made, tmp_path / "artifacts", symlinks=True))
    policy = {"model": "scripted", "base_url": server}
    run = api.collect(artifacts=root, policy=policy, tasks=2, samples=2)
    assert run.path == (root / "collect" / "latest").resolve() == api.find("collect", root).path
    dotted = {f"policy.{key}": value for key, value in policy.items()}
    assert api.collect(artifacts=root, tasks=2, samples=2, **dotted).path == run.path
    teachers = [{"name": n, "model": m, "base_url": server, "max_tokens": 64} for n, m in TEACHERS.items()]
    answers = api.replay_teachers(run, artifacts=root, teachers=teachers)
    assert answers.path == (root / "replay-teachers" / "latest").resolve()
    assert api.replay_teachers.plan(run, artifacts=root, teachers=teachers).units == 24


def test_a_table_is_the_same_as_arrow_duckdb_and_pandas(made: Path) -> None:
    run = api.find("collect", made)
    rows = [row["rollout_id"] for row in run.scan("rollouts").arrow().to_pylist()]
    assert len(rows) == 4 and run.scan("rollout").arrow(["rollout_id"]).column_names == ["rollout_id"]
    assert [row[0] for row in run.scan("rollouts").duckdb().project("rollout_id").fetchall()] == rows
    assert list(run.scan("rollouts").pandas()["rollout_id"]) == rows
    with pytest.raises(api.BadInput, match="has no table 'pairs'; it has rollouts, steps, tasks"):
        run.scan("pairs")


def test_mistakes_are_the_sentences_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(api.UsageError, match=r"Did you mean tasks\?"):
        api.collect(artifacts=tmp_path, taks=3)
    with pytest.raises(api.BadInput, match="Run `composer collect`"):
        api.extract_pairs(artifacts=tmp_path)
    assert api.collect.settings()["tasks"] == 25
