"""Runs in a bucket of the hub: published and fetched as from any bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import FileHub, file_hub
from support.runs import written

from composer_stages.errors import BadInput, InfrastructureError, UsageError
from composer_stages.runs import bucket, store
from composer_stages.runs.bucket import HubBucket, open_bucket, open_store
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Run

TOKEN = "hf_" + "n0tarealtoken" * 2
IN_BUCKET = "hf://buckets/someone/runs/kata/first"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with file_hub(TOKEN, tmp_path / "storage") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = written(tmp_path / "here", "collect/20260102T030405Z-kata-abc", [(ROLLOUT, [{"rollout_id": "r"}])])
    store.write_sealed(folder / "report.txt", b"one rollout")
    store.write_sealed(folder / "figures" / "a b.txt", b"in a folder")
    return Run(folder)


def test_a_published_run_is_read_as_it_was(tmp_path: Path, run: Run, hub: FileHub) -> None:
    url, there = IN_BUCKET, hub.objects
    assert bucket.is_address(url) and bucket.publish(run, url) > 0
    names = {"manifest.json", "report.txt", "rollouts.parquet", "figures/a b.txt"}
    assert set(there) == {f"kata/first/{name}" for name in names}
    assert len([path for path in hub.asked if path.endswith("/runs/batch")]) == 2, "the manifest comes last"
    fetched = Run(bucket.fetch(url, tmp_path / "cache"))
    assert fetched.rows(ROLLOUT) == run.rows(ROLLOUT) and fetched.read_file("figures/a b.txt") == b"in a folder"
    assert fetched.manifest == run.manifest and bucket.publish(run, url) == 0
    there["kata/first/rollouts.parquet"] = b"PAR1"
    with pytest.raises(BadInput, match=r"rollouts\.parquet has"):
        bucket.fetch(url, tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="holds no run: it has no"):
        bucket.fetch(url.replace("first", "second"), tmp_path / "cache")


def test_files_of_a_bucket_are_replaced_listed_and_deleted(tmp_path: Path, hub: FileHub) -> None:
    place = open_store(IN_BUCKET)
    assert isinstance(place, HubBucket) and place.keys("") == [] and place.read("a") is None
    place.write("a", b"first")
    place.write("b/c", b"")
    (tmp_path / "a").write_bytes(b"second" * 1000)
    place.send(tmp_path / "a", "a")
    open_store("hf://buckets/someone/runs/kata/first-other").write("a", b"of another run")
    assert place.keys("") == ["a", "b/c"] and place.keys("b/") == ["b/c"]
    assert place.read("a") == b"second" * 1000 and place.read("b/c") == b""
    place.fetch("a", tmp_path / "fetched" / "a")
    assert (tmp_path / "fetched" / "a").read_bytes() == b"second" * 1000
    assert (place.sent, place.received) == (6005, 12000)
    place.delete(["a", "not there"])
    place.delete([])
    assert place.keys("") == ["b/c"] and len(hub.objects) == 2
    with pytest.raises(FileNotFoundError):
        place.send(tmp_path / "gone", "gone")


def test_what_the_hub_cannot_do_is_a_sentence(hub: FileHub) -> None:
    with pytest.raises(UsageError, match="will not do for replicas"):
        open_bucket(IN_BUCKET)
    for url in ("hf://someone/runs", "hf://spaces/a/b", "hf://buckets/someone", "hf://datasets/a/b/run"):
        with pytest.raises(UsageError, match="is not an address on the hub"):
            open_store(url)
    with pytest.raises(UsageError, match="there is no buckets/someone/nothing that this token may see"):
        open_store("hf://buckets/someone/nothing/run")


def test_a_hub_that_fails_is_a_sentence_without_the_token(
    run: Run, hub: FileHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_store(IN_BUCKET)
    hub.status = 400
    with pytest.raises(InfrastructureError, match=r"first failed at reading manifest\.json \(400: no\)") as failed:
        place.read("manifest.json")
    assert TOKEN not in str(failed.value)
    hub.status = 200
    monkeypatch.setenv("HF_TOKEN", TOKEN[::-1])
    with pytest.raises(UsageError, match="that this token may see"):
        bucket.publish(run, IN_BUCKET)
