"""A chain on Hugging Face Jobs: their client, and a fake of their API that runs the command with the bucket mounted."""

import json
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_line import call_process, until
from support.hf_jobs import Jobs, serving_jobs
from support.server import Server
from support.submitting import KEY, chain, digests, holding, job, name_of

TOKEN = "hf_0123456789abcdef"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Jobs]:
    (tmp_path / "bucket").mkdir()
    with serving_jobs(TOKEN, {"me/runs": tmp_path / "bucket"}) as running:
        yield running


@pytest.fixture
def composer(service: Jobs, model: Server, tmp_path: Path) -> Callable:
    (tmp_path / "small.toml").write_text(chain(model.url, sandbox="none"))
    mine = {"HF_ENDPOINT": service.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hub"), "TEACHING_KEY": KEY}
    return lambda *words, at="artifacts", **more: call_process(tmp_path / at, *words, **{**mine, **more})


@pytest.fixture
def words(tmp_path: Path) -> list:
    where = {"image": "composer", "bucket": "me/runs", "python": sys.executable, "env.PYTHONPATH": ROOT}
    sets = [word for key, value in where.items() for word in ("--set", f"on.{key}={value}")]
    return ["run", "--preset", tmp_path / "small.toml", "--on", "hf-jobs", *sets]


def here(composer, tmp_path: Path) -> dict[str, str]:
    """The digests of the same chain in this process."""
    done = composer("run", "--preset", tmp_path / "small.toml", at="here")
    assert done.returncode == 0, done.stderr
    return digests(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_is_tried_again_and_ends_in_the_same_content_without_keys(
    composer, words, service, model, held, tmp_path
):
    held.first = 6
    name = name_of(composer(*words, "--json"))
    until(lambda: len(model.requests) == 7, seconds=200)  # the seventh is held
    assert job(composer, name)["status"] == "running"
    service.jobs[0].kill()
    held.let.set()
    log = composer("show", name, "--follow")
    assert log.returncode == 0 and "resumed, done in" in log.stdout, log.stdout + log.stderr
    assert (service.jobs[0].launches, job(composer, name)["status"]) == (2, "complete")
    asked = [json.dumps(request, sort_keys=True) for request in model.requests]
    assert digests(tmp_path / "bucket") == here(composer, tmp_path)
    assert len(asked) == len(model.requests) - len(asked) + 1  # one was under way when the machine went away
    assert set(model.keys) == {f"Bearer {KEY}"}
    places = (tmp_path / "artifacts", tmp_path / "bucket")
    assert holding(KEY, *places) == holding(TOKEN, *places) == []
    assert KEY not in json.dumps(service.jobs[0].asked["environment"]) + json.dumps(service.jobs[0].asked["command"])
    assert service.jobs[0].asked["secrets"] == {"TEACHING_KEY": KEY}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_units_are_dealt_to_workers_ends_in_the_same_content(composer, words, service, model, tmp_path):
    name = name_of(composer(*words, "--set", "on.workers=processes:2", "--json"))
    until(lambda: job(composer, name)["status"] == "complete", seconds=300)
    assert digests(tmp_path / "bucket") == here(composer, tmp_path)
    assert b"--on processes:2" in b64decode(service.jobs[0].asked["environment"]["COMPOSER_SCRIPT"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_job_stays_so_and_the_same_command_goes_on(composer, words, service, model, held, tmp_path):
    held.first = 6
    name = name_of(composer(*words, "--json"))
    until(lambda: len(model.requests) == 7, seconds=200)
    stopped = composer("cancel", name)
    held.let.set()
    assert stopped.returncode == 0 and (service.jobs[0].stage, service.jobs[0].launches) == ("CANCELED", 1)
    until(lambda: service.jobs[0].process.poll() is not None)
    again = name_of(composer(*words, "--json"))
    until(lambda: job(composer, again)["status"] == "complete", seconds=300)
    assert digests(tmp_path / "bucket") == here(composer, tmp_path)


def failing(words: list) -> list:
    """The same job, whose setup ends it at once."""
    return [*words, "--set", 'on.setup="echo said; exit 3"', "--set", "on.attempts=2"]


def test_a_busy_service_is_asked_again(composer, words, service):
    service.busy = [429, 429]
    name = name_of(composer(*failing(words), "--json"))
    assert len(service.jobs) == 1 and service.asked.count("POST /api/jobs/me") == 3
    until(lambda: service.jobs[0].over)
    service.busy = [503]
    found = job(composer, name)
    assert (found["status"], found["reason"]) == ("failed", "Job failed with exit code: 3")
    assert service.jobs[0].launches == 2
    shown = composer("show", name).stdout
    assert shown.count("said") == 2 and "status: failed" in shown


def test_a_job_whose_creation_was_not_answered_is_found_and_not_created_again(composer, words, service):
    service.lost = 1
    name_of(composer(*failing(words), "--json"))
    assert len(service.jobs) == 1 and service.asked.count("POST /api/jobs/me") == 1


def test_a_launch_is_ended_at_its_time(composer, words, service):
    sets = ["--set", 'on.setup="sleep 60"', "--set", "on.timeout=1s", "--set", "on.attempts=1"]
    name_of(composer(*words, *sets, "--json"))
    until(lambda: service.jobs[0].over)
    assert service.jobs[0].stage == "ERROR"


@pytest.mark.parametrize(
    ("more", "variables", "said"),
    [
        (["--set", "on.bucket=me/other"], {}, "refuses this job (404): Bucket me/other not found"),
        (["--set", "on.flavor=abacus"], {}, "refuses this job (400): Unknown flavor abacus"),
        ([], {"HF_TOKEN": "hf_wrong00000000"}, "refuses the token"),
        ([], {"HF_TOKEN": ""}, "There is no token for Hugging Face"),
        ([], {"TEACHING_KEY": ""}, "The chain needs TEACHING_KEY"),
        (["--set", "on.bucket=mine"], {}, "cannot take on.bucket"),
    ],
)
def test_what_is_refused_is_said_in_a_sentence_and_leaves_no_record(composer, words, tmp_path, more, variables, said):
    done = composer(*words, *more, **variables)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "hf_wrong" not in done.stderr and not list(tmp_path.glob("artifacts/submitted/*"))


def test_a_dry_run_asks_nobody(composer, words, service):
    done = composer(*words, "--dry-run", "--json", HF_TOKEN="", TEACHING_KEY="")
    spec = json.loads(done.stdout)["spec"]
    assert service.asked == [] and spec["keys"] == ["TEACHING_KEY"] and "secrets" not in spec
    assert spec["volumes"] == [{"type": "bucket", "source": "me/runs", "mountPath": "/artifacts"}]
    assert "--artifacts /artifacts" in spec["script"]


def test_an_image_and_a_bucket_must_be_named(composer, tmp_path):
    done = composer("run", "--preset", tmp_path / "small.toml", "--on", "hf-jobs")
    assert done.returncode == 2 and "run --on hf-jobs needs the setting on.image" in done.stderr
