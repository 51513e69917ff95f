"""A run in a bucket is the run: published whole, fetched once, held against its digests, never overwritten."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs
from support.runs import written
from support.s3 import s3 as s3

from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import bucket, catalog, index, store
from composer_stages.runs.catalog import check_inputs
from composer_stages.runs.kinds import ROLLOUT, STEP
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.sql import run_sql, sql_query


@pytest.fixture
def run(tmp_path: Path) -> Run:
    steps = [{"rollout_id": "r", "step": i, "action": "x" * 1000} for i in range(3)]
    folder = written(
        tmp_path / "here", "collect/20260102T030405Z-kata-abc", [(ROLLOUT, [{"rollout_id": "r"}]), (STEP, steps)]
    )
    store.write_sealed(folder / "report.txt", b"one rollout")
    store.write_sealed(folder / "scratch" / "left.bin", b"of no use")
    store.write_sealed(folder / ".reserve", b"of no use")
    return Run(folder)


def held_alike(one: Run, other: Run) -> bool:
    return one.manifest == other.manifest and all(one.rows(kind) == other.rows(kind) for kind in (ROLLOUT, STEP))


def test_a_published_run_is_read_as_it_was(tmp_path: Path, run: Run) -> None:
    url = f"file://{tmp_path}/bucket/first"
    assert bucket.publish(run, url) > 0
    there = {str(p.relative_to(tmp_path / "bucket/first")) for p in (tmp_path / "bucket/first").rglob("*")}
    assert there == {"manifest.json", "report.txt", "rollouts.parquet", "steps.parquet"}
    fetched = Run(catalog.find(tmp_path / "artifacts", url))
    assert held_alike(run, fetched) and fetched.read_file("report.txt") == b"one rollout"
    assert fetched.path.is_relative_to(tmp_path / "artifacts" / "remote")
    check_inputs(Inputs({"rollouts": fetched}))
    assert run_sql(sql_query(index.of([fetched]), "select run, count(*) from steps group by run"))[1] == [
        ("collect/first", 3)
    ]


def test_what_was_fetched_is_not_fetched_again_until_it_changes(tmp_path: Path, run: Run) -> None:
    url = f"file://{tmp_path}/bucket/first"
    bucket.publish(run, url)
    fetched = bucket.fetch(url, tmp_path / "cache")
    (tmp_path / "bucket/first/steps.parquet").unlink()
    assert bucket.fetch(url, tmp_path / "cache") == fetched
    (fetched / "steps.parquet").write_bytes(b"damaged here")
    with pytest.raises(BadInput, match=r"steps\.parquet is missing\. Publish the run again\."):
        bucket.fetch(url, tmp_path / "cache")
    with pytest.raises(BadInput, match="is not a run folder"):
        Run(fetched)


def test_nothing_is_overwritten_and_nothing_sent_twice(tmp_path: Path, run: Run) -> None:
    url = f"file://{tmp_path}/bucket/first"
    bucket.publish(run, url)
    assert bucket.publish(run, url) == 0
    other = Run(written(tmp_path / "here", "collect/other", [(ROLLOUT, [{"rollout_id": "other"}])]))
    with pytest.raises(UsageError, match=r"holds another run\. Choose another address"):
        bucket.publish(other, url)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "steps.parquet").write_bytes(b"PAR1"), "steps.parquet has"),
        (lambda folder: (folder / "manifest.json").unlink(), "holds no run: it has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{}"), "cannot be read by this version of Composer"),
    ],
)
def test_a_damaged_run_is_refused(tmp_path: Path, run: Run, change: Callable[[Path], object], said: str) -> None:
    url = f"file://{tmp_path}/bucket/first"
    bucket.publish(run, url)
    change(tmp_path / "bucket/first")
    with pytest.raises(BadInput, match=said):
        bucket.fetch(url, tmp_path / "cache")


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_an_unfinished_run_is_neither_published_nor_read(tmp_path: Path, status: str) -> None:
    unfinished = Run(written(tmp_path, "collect/run", [(ROLLOUT, [])], status=status))
    with pytest.raises(BadInput, match=f"is {status}, not complete. Finish it first"):
        bucket.publish(unfinished, f"file://{tmp_path}/bucket/first")
    with pytest.raises(BadInput, match=f"is {status}, not complete. Publish the run once"):
        bucket.fetch(f"file://{unfinished.path}", tmp_path / "cache")


def test_a_name_in_a_bucket_cannot_lead_out_of_the_folder() -> None:
    assert bucket.is_inside("checkpoint/model.safetensors")
    assert not any(map(bucket.is_inside, ["../x", "/etc/x", "a/../../x", ".."]))


@needs("moto")
@pytest.mark.slow
def test_a_run_lies_in_an_s3_bucket(tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    large = [{"rollout_id": os.urandom(20_000).hex()} for _ in range(600)]  # more than one part
    run = Run(written(tmp_path / "here", "collect/20260102T030405Z-kata-abc", [(ROLLOUT, large), (STEP, [])]))
    assert bucket.publish(run, "s3://runs/kata") > 12e6
    assert held_alike(run, Run(bucket.fetch("s3://runs/kata/", tmp_path / "cache")))
    assert bucket.publish(run, "s3://runs/kata") == 0
    with pytest.raises(BadInput, match="s3://runs/nothing holds no run"):
        bucket.fetch("s3://runs/nothing", tmp_path / "cache")
