"""A run that lies in a bucket while it goes on: there at its end, and enough of it there after a kill at any moment."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support import blocks
from support.command_line import call, until
from support.hub import file_hub
from support.s3 import s3 as s3
from support.server import Reply, answer, serving

from composer_stages import collect, export
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.runs import runner, store
from composer_stages.runs.bucket import OWNER, Mirror, fetch, open_store
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Run

EVERY_S = 0.1
TESTS = Path(__file__).parents[2]
FOUND = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
"""For processes that import an environment of the tests' own."""


PLACES = (
    "file",
    pytest.param("hub", marks=pytest.mark.slow),
    pytest.param("s3", marks=(pytest.mark.slow, needs("moto"))),
)


@pytest.fixture(params=PLACES)
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a run may lie: a folder, a bucket of a local S3 server, one of a fake of the hub."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/run"
        return
    if request.param == "hub":
        monkeypatch.setenv("HF_TOKEN", "any-token")
        with file_hub("any-token", tmp_path / "storage") as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            yield "hf://buckets/someone/runs/there/run"
        return
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    yield "s3://runs/there/run"


def config(url: str, tasks: int = 6) -> collect.Config:
    policy = {"model": "m", "base_url": url, "max_tokens": 16, "concurrency": 2}
    return collect.Config(env={"name": "support.environments:GuessEnv"}, policy=policy, tasks=tasks, samples=2)


def collected(url: str, address: str, here: Path, **options: Any) -> Run:
    """`collect` with its run at an address, on a machine that has `here`."""
    mirror = Mirror(address, "collect", here / "remote", EVERY_S)
    mirror.bring()
    result = runner.execute("collect", {}, config(url), root=here, out=mirror.folder, mirror=mirror, **options)
    return Run(result.path)


def elsewhere(url: str, address: str, here: Path) -> BaseProcess:
    """The same in a process of its own."""
    here.mkdir()
    words = f"{url!r}, {address!r}, Path({str(here)!r})"
    source = f"from pathlib import Path; from tests.stages.runs import test_mirror; test_mirror.collected({words})"
    return blocks.start(source, here, os.environ | FOUND)


def says(text: dict[str, Any], earlier: int, delay_s: float = 0.0) -> Reply:
    """One answer, by what was asked."""
    del earlier
    return Reply(body=answer(store.digest([text["messages"], text["seed"]])[:6]), delay_s=delay_s)


def units_at(address: str) -> int:
    bucket = open_store(address)
    opened = [bucket.read(key) or b"" for key in bucket.keys("") if key.endswith(".open")]
    return sum(data.count(b"\n") for data in opened)


def content(run: Run) -> dict[str, str]:
    return {name: out["content_sha256"] for name, out in run.manifest.outputs.items()}


def test_a_finished_run_lies_there_as_if_it_had_been_published(tmp_path: Path, address: str) -> None:
    with serving(says) as server:
        run = collected(server.url, address, tmp_path / "here")
        keys = open_store(address).keys("")
        assert OWNER not in keys and {"manifest.json", "rollouts.parquet", "steps/000000.jsonl.gz"} <= set(keys)
        assert not [key for key in keys if key.endswith(".open") or "scratch" in key]
        assert fetch(address, tmp_path / "here" / "remote") == run.path  # without fetching anything
        fetched = Run(fetch(address, tmp_path / "elsewhere"))
        assert fetched.rows(ROLLOUT) == run.rows(ROLLOUT)
        asked = len(server.requests)
        assert content(collected(server.url, address, tmp_path / "third")) == content(run)
        assert len(server.requests) == asked, "what is complete there is not done again on another machine"


def test_a_machine_that_is_lost_is_replaced_by_one_that_has_the_bucket_alone(tmp_path: Path, address: str) -> None:
    with serving(lambda body, n: says(body, n, 0.15)) as server:
        undisturbed = content(collected(server.url, f"file://{tmp_path}/other", tmp_path / "undisturbed"))
        whole = len(server.requests)
        process = elsewhere(server.url, address, tmp_path / "lost")
        until(lambda: units_at(address) >= 3 or not process.is_alive(), 60)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "lost" / blocks.PRINTED).read_text()
        kept, before = units_at(address), len(server.requests)
        with pytest.raises(UsageError, match="already holds this run"):
            collected(server.url, address, tmp_path / "fresh")
        run = collected(server.url, address, tmp_path / "fresh", resume=True)
    assert content(run) == undisturbed and run.manifest.attempts == 2
    assert 0 < len(server.requests) - before == whole - 2 * kept, "what had been sent is not asked again"
    assert content(Run(fetch(address, tmp_path / "reader"))) == undisturbed


def test_whoever_begins_last_owns_the_run(tmp_path: Path, address: str) -> None:
    second_asks = threading.Event()

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        # 14 answers to 12 rollouts of two turns finish a unit. The first process then has two calls open at most, which
        # wait: it is not through before the second one, which sends the next call, is up.
        if earlier >= 16:
            second_asks.set()
        if earlier >= 14:
            second_asks.wait(120)
        return says(body, earlier, 0.1)

    with serving(reply) as server:
        first = elsewhere(server.url, address, tmp_path / "first")
        until(lambda: units_at(address) >= 1 or not first.is_alive(), 60)
        run = collected(server.url, address, tmp_path / "second", resume=True)
        first.join(60)
    said = (tmp_path / "first" / blocks.PRINTED).read_text()
    assert first.exitcode == 1 and "was taken over by another process, so this one stopped" in said
    assert run.manifest.status == "complete"
    assert content(Run(fetch(address, tmp_path / "reader"))) == content(run)


def test_the_folder_here_is_kept_where_nobody_else_went_on(tmp_path: Path) -> None:
    """After a kill on the same machine the folder is newer than the bucket."""
    address = f"file://{tmp_path}/bucket/run"
    with serving(lambda body, n: says(body, n, 0.1)) as server:
        process = elsewhere(server.url, address, tmp_path / "here")
        until(lambda: units_at(address) >= 2 or not process.is_alive(), 60)
        process.kill()
        process.join()
        mirror = Mirror(address, "collect", tmp_path / "here" / "remote")
        (mirror.folder / "steps" / "mark").write_text("newer")
        mirror.bring()
        assert (mirror.folder / "steps" / "mark").exists()
        (mirror.folder / OWNER).write_text("somebody else went on")
        mirror.bring()
        assert not (mirror.folder / "steps" / "mark").exists()


def test_what_cannot_go_on_from_its_units_is_sent_whole_at_its_end(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket/exported"
    with serving(says) as server:
        rollouts = collected(server.url, f"file://{tmp_path}/bucket/run", tmp_path)
        mirror = Mirror(address, "export", tmp_path / "remote", EVERY_S)
        at = {"root": tmp_path, "out": mirror.folder, "mirror": mirror}
        runner.execute("export", {"rollouts": rollouts}, export.Config(format="trl"), **at)
    assert Run(fetch(address, tmp_path / "reader")).damage() is None


def test_a_bucket_that_cannot_be_written_is_said_and_the_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    mirror = Mirror(f"file://{tmp_path}/bucket/run", "collect", tmp_path / "remote", EVERY_S)
    gone, number = tmp_path / "bucket" / "run", itertools.count()
    with serving(says) as server:

        def block(what: str, done: int, total: int) -> None:
            while done == total and gone.is_dir():  # the thread that uploads may make the folder again meanwhile
                gone.rename(tmp_path / f"moved-{next(number)}")
                with suppress(IsADirectoryError):
                    gone.write_text("a file in its place")

        at = {"root": tmp_path, "out": mirror.folder, "mirror": mirror}
        with pytest.raises(InfrastructureError, match="failed at"):
            runner.execute("collect", {}, config(server.url), **at, listener=block)
    assert Run(mirror.folder).manifest.status == "complete"


def test_an_address_is_an_out_and_no_artifacts(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket/kata"
    with serving(says) as server:
        words = ["collect", "--env", "support.environments:GuessEnv", "--policy", "m", "-s", "tasks=1", "-s"]
        words += ["samples=1", "-s", f"policy.base_url={server.url}", "--out", address]
        assert (first := call(tmp_path / "one", *words, **FOUND)).returncode == 0, first.stderr
        again = call(tmp_path / "two", *words, **FOUND)
    assert again.returncode == 0 and "up to date" in again.stderr
    assert call(tmp_path / "three", "show", address).returncode == 0
    refused = call(tmp_path / "four", "status", COMPOSER_ARTIFACTS="s3://bucket/artifacts")
    assert refused.returncode == 2 and "is an address, and --artifacts is a folder" in " ".join(refused.stderr.split())
