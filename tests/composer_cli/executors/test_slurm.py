"""A chain on a real Slurm of one node: its result, its keys, preemption, its time limit, its end from here."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import needs
from support.command_line import call, until

from tests.composer_cli.executors import slurm
from tests.composer_cli.executors.submitting import KEY, chain, digests, here, holding, job, name_of

REQUESTS = 16
"""Two tasks, two samples, four steps: what the chain asks for, however often it is interrupted."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs("slurm")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def composer(cluster, model, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "small.toml").write_text(chain(model.url))
    variables = {**cluster, "TEACHING_KEY": KEY, "HOME": str(tmp_path)}
    return lambda *words, at="artifacts": call(tmp_path / at, *words, **variables)


@pytest.fixture
def submitted(composer, tmp_path: Path) -> Callable[..., str]:
    """Submit the chain; the name of the job."""

    def submitting(*words: str) -> str:
        return name_of(composer("run", "--preset", tmp_path / "small.toml", "--on", "slurm", "--json", *words))

    return submitting


def ended(composer, name: str) -> str:
    """Its status when it is over."""
    until(lambda: job(composer, name)["status"] not in ("queued", "running"), seconds=300)
    return job(composer, name)["status"]


def number(tmp_path: Path, name: str) -> str:
    return json.loads((tmp_path / "artifacts" / "submitted" / name / "job.json").read_text())["handle"]["id"]


def test_a_submitted_chain_ends_in_the_same_content_and_its_key_is_written_nowhere(
    composer, submitted, model, tmp_path
):
    name = submitted("--set", "on.options.time=10")
    log = composer("show", name, "--follow")
    assert log.returncode == 0 and "collect: done in" in log.stdout, log.stdout + log.stderr
    assert ended(composer, name) == "complete" and len(model.requests) == REQUESTS
    assert digests(tmp_path / "artifacts") == here(composer, tmp_path)
    assert set(model.keys) == {f"Bearer {KEY}"}
    assert holding(KEY, tmp_path / "artifacts") == []
    shown = composer("show", name).stdout
    assert "status: complete" in shown and "The report: " in shown
    assert job(composer, name)["on"] == "slurm"


def test_a_preempted_job_is_queued_again_and_goes_on_without_asking_twice(
    composer, submitted, cluster, model, held, tmp_path
):
    held.first = 5
    name = submitted()
    until(lambda: len(model.requests) == 6, seconds=200)  # the sixth is held
    high = ["sbatch", "--parsable", "-p", "high", "-c2", "--output=/dev/null", "--wrap", "sleep 1"]
    subprocess.run(high, check=True, env={**os.environ, **cluster}, capture_output=True)
    held.let.set()
    until(lambda: "attempt 2" in job(composer, name)["reason"], seconds=200)
    assert ended(composer, name) == "complete" and len(model.requests) == REQUESTS
    assert digests(tmp_path / "artifacts") == here(composer, tmp_path)
    assert len(model.requests) == 2 * REQUESTS


def test_a_job_that_nears_its_time_limit_queues_itself_again(composer, submitted, cluster, model, held, tmp_path):
    held.first = 5
    name = submitted()
    until(lambda: len(model.requests) == 6, seconds=200)
    slurm.said(cluster, "scancel", "--batch", "--signal=USR1", number(tmp_path, name))
    held.let.set()
    assert ended(composer, name) == "complete" and len(model.requests) == REQUESTS
    log = composer("show", name, "--follow").stdout
    assert "this job queues itself again" in log and "resumed, done in" in log
    assert digests(tmp_path / "artifacts") == here(composer, tmp_path)


def test_a_cancelled_job_stays_cancelled_and_the_same_command_goes_on(
    composer, submitted, model, held, cluster, tmp_path
):
    held.first = 5
    name = submitted()
    until(lambda: len(model.requests) == 6, seconds=200)
    again = composer("run", "--preset", tmp_path / "small.toml", "--on", "slurm")
    assert again.returncode == 2 and f"`composer cancel {name}` stops it" in again.stderr
    held.let.set()
    stopped = composer("cancel", name)
    assert stopped.returncode == 0 and "is cancelled" in stopped.stdout
    until(lambda: "CANCELLED" in slurm.said(cluster, "scontrol", "show", "job", "-o", number(tmp_path, name)), 60)
    until(lambda: not slurm.said(cluster, "squeue", "-h"), 60)
    assert job(composer, name)["status"] == "cancelled"
    assert composer("cancel", name).returncode == 2
    other = submitted()
    assert other != name and ended(composer, other) == "complete" and len(model.requests) == REQUESTS
    assert digests(tmp_path / "artifacts") == here(composer, tmp_path)


def test_what_sbatch_refuses_leaves_no_record(composer, tmp_path):
    words = ["run", "--preset", tmp_path / "small.toml", "--on", "slurm", "--set", "on.options.partition=nowhere"]
    done = composer(*words)
    assert done.returncode == 2 and "invalid partition" in done.stderr
    assert not list((tmp_path / "artifacts" / "submitted").glob("*"))
