"""A chain on Hugging Face Jobs: their client, and a fake of their API that runs the command with the bucket mounted."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from support.command_line import call, call_process, until
from support.loopback import Handler, listening
from support.server import Server

from tests.composer_cli.executors.container import container
from tests.composer_cli.executors.submitting import KEY, chain, digests, here, holding, job, name_of

OWNER = "me"
FIELDS = {
    *("command", "arguments", "environment", "flavor", "secrets"),
    *("timeoutSeconds", "attempts", "labels", "volumes", "dockerImage"),
}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Launched:
    """A job: what was asked for, how it stands, what it printed, and its process."""

    id: str
    asked: dict[str, Any]
    stage: str = "SCHEDULING"
    message: str | None = None
    launches: int = 0
    created: str = field(default_factory=_now)
    events: list[dict[str, str]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    @property
    def over(self) -> bool:
        """Whether it is in a terminal stage."""
        return self.stage in ("COMPLETED", "CANCELED", "ERROR", "DELETED")

    def say(self, text: str) -> None:
        """A line of its log."""
        self.events.append({"data": text, "timestamp": _now()})

    def info(self) -> dict[str, Any]:
        """What the API tells about it; secrets are encrypted and not told."""
        told = {key: value for key, value in self.asked.items() if key not in ("secrets", "attempts", "timeoutSeconds")}
        owner = {"id": "1", "name": OWNER, "type": "user"}
        status = {"stage": self.stage, "message": self.message}
        return {"id": self.id, "createdAt": self.created, "owner": owner, "status": status, **told}

    def end(self, stage: str, number: int = signal.SIGTERM) -> None:
        """Another stage, and a signal to its processes."""
        self.stage = stage
        self.kill(number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """As a machine that goes away does, by default."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)


@dataclass
class Jobs:
    """The service. `busy` are statuses that the next requests for a job are answered with."""

    token: str
    buckets: dict[str, Path]
    endpoint: str = ""
    jobs: list[Launched] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    lost: int = 0
    """So many of the next jobs are created, and their creation is never answered."""
    asked: list[str] = field(default_factory=list)

    def refusal(self, asked: dict[str, Any]) -> tuple[int, str] | None:
        """Why a job is not created."""
        if unknown := asked.keys() - FIELDS:
            return 400, f"unknown fields {sorted(unknown)}"
        for volume in asked.get("volumes", []):
            if volume["type"] != "bucket" or volume["source"] not in self.buckets:
                return 404, f"Bucket {volume['source']} not found"
        if any(len(value) > 100 or not re.fullmatch(r"[\w.-]*", value) for value in asked.get("labels", {}).values()):
            return 400, "A label is too long or has other characters"
        return None

    def create(self, asked: dict[str, Any]) -> Launched:
        """A job that is being launched."""
        job = Launched(f"{len(self.jobs):024x}", asked)
        self.jobs.append(job)
        threading.Thread(target=self._run, args=(job,), daemon=True).start()
        return job

    def _run(self, job: Launched) -> None:
        while not job.over:
            job.launches += 1
            job.stage = "RUNNING"
            job.say(f"===== Job started at {_now()} =====")
            code = self._launch(job)
            if job.over:
                return
            if code == 0:
                job.stage = "COMPLETED"
            elif job.launches >= job.asked.get("attempts", 1):
                job.stage, job.message = "ERROR", f"Job failed with exit code: {code}"

    def _launch(self, job: Launched) -> int:
        mounts = {volume["mountPath"]: self.buckets[volume["source"]] for volume in job.asked.get("volumes", [])}
        env = {"PATH": os.environ["PATH"], "HOME": "/tmp", **job.asked["environment"], **job.asked.get("secrets", {})}
        job.process = subprocess.Popen(
            [*container(mounts), *job.asked["command"]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        timer = threading.Timer(job.asked.get("timeoutSeconds", 1800), job.kill)
        timer.start()
        for line in job.process.stdout or ():
            job.say(line.rstrip("\n"))
        timer.cancel()
        return job.process.wait()


@contextmanager
def serving_jobs(token: str, buckets: dict[str, Path]) -> Iterator[Jobs]:
    """A running service; what still runs is killed when the block ends."""
    service = Jobs(token, buckets)

    class Asked(Handler):
        def post(self) -> None:
            self._answer("POST", self.body())

        def get(self) -> None:
            self._answer("GET", b"")

        def _answer(self, method: str, data: bytes) -> None:
            url = urlsplit(self.path)
            service.asked.append(f"{method} {url.path}")
            if self.headers.get("Authorization") != f"Bearer {token}":
                return self.send(401, {"error": f"Invalid token {self.headers.get('Authorization')}"})
            if url.path == "/api/whoami-v2":
                return self.send(200, {"name": OWNER, "type": "user"})
            if service.busy:
                return self.send(service.busy.pop(0), {"error": "busy"}, {"Retry-After": "1"})
            if url.path == f"/api/jobs/{OWNER}":
                return self._create(data) if method == "POST" else self._list(url.query)
            found = re.fullmatch(rf"/api/jobs/{OWNER}/(\w+)(/logs|/cancel)?", url.path)
            job = next((job for job in service.jobs if found and job.id == found[1]), None)
            if found is None or job is None:
                return self.send(404, {"error": "Job not found"})
            if found[2] == "/logs":
                return self._logs(job)
            if found[2] == "/cancel":
                job.end("CANCELED")
            return self.send(200, job.info())

        def _create(self, data: bytes) -> None:
            asked = json.loads(data)
            if (refused := service.refusal(asked)) is not None:
                return self.send(refused[0], {"error": refused[1]})
            job = service.create(asked)
            if service.lost:
                service.lost -= 1
                self.close_connection = True
                return None
            return self.send(200, job.info())

        def _list(self, query: str) -> None:
            wanted = dict(value.split("=", 1) for key, value in parse_qsl(query) if key == "label")
            fitting = [job.info() for job in service.jobs if wanted.items() <= job.asked.get("labels", {}).items()]
            self.send(200, fitting)

        def _logs(self, job: Launched) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            sent = 0
            try:
                while True:
                    over = job.over and (job.process is None or job.process.poll() is not None)
                    for event in job.events[sent:]:
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                        sent += 1
                    self.wfile.flush()
                    if over and sent == len(job.events):
                        break
                    time.sleep(0.1)
            except (BrokenPipeError, ConnectionResetError):
                pass
            self.close_connection = True

    with listening(Asked) as service.endpoint:
        try:
            yield service
        finally:
            for job in service.jobs:
                job.end("DELETED", signal.SIGKILL)


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
    return lambda *words, at="artifacts", run=call, **more: run(tmp_path / at, *words, **{**mine, **more})


@pytest.fixture
def words(tmp_path: Path) -> list:
    where = {"image": "composer", "bucket": "me/runs", "python": sys.executable, "env.PYTHONPATH": ROOT}
    sets = [word for key, value in where.items() for word in ("--set", f"on.{key}={value}")]
    return ["run", "--preset", tmp_path / "small.toml", "--on", "hf-jobs", *sets]


def until_seventh(service: Jobs, model: Server) -> None:
    """Wait for the job's seventh question, which is held; a job that ends before it fails the test with its log."""

    def asked() -> bool:
        assert not service.jobs[0].over, service.jobs[0].events
        return len(model.requests) == 7

    until(asked, seconds=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_is_retried_with_equal_content_and_no_keys_on_disk(
    composer, words, service, model, held, tmp_path
):
    held.first = 6
    name = name_of(composer(*words, "--json"))
    until_seventh(service, model)
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
def test_a_cancelled_job_stays_cancelled_and_the_same_command_resumes(composer, words, service, model, held, tmp_path):
    held.first = 6
    name = name_of(composer(*words, "--json"))
    until_seventh(service, model)
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
    ("more", "variables", "part", "run"),
    [
        (["--set", "on.bucket=me/other"], {}, "(404): Bucket me/other not found", call),
        ([], {"HF_TOKEN": "hf_wrong00000000"}, "refuses the token", call),
        # A process of its own: the library finds the folder of a kept token when it is imported.
        ([], {"HF_TOKEN": ""}, "hf auth login", call_process),
        ([], {"TEACHING_KEY": ""}, "TEACHING_KEY", call),
        (["--set", "on.bucket=mine"], {}, "on.bucket", call),
    ],
)
def test_a_refused_submission_leaves_no_record(composer, words, tmp_path, more, variables, part, run):
    done = composer(*words, *more, run=run, **variables)
    assert done.returncode == 2 and part in done.stderr, done.stderr
    assert "hf_wrong" not in done.stderr and not list(tmp_path.glob("artifacts/submitted/*"))


def test_a_dry_run_sends_no_request(composer, words, service):
    done = composer(*words, "--dry-run", "--json", HF_TOKEN="", TEACHING_KEY="")
    spec = json.loads(done.stdout)["spec"]
    assert service.asked == [] and spec["keys"] == ["TEACHING_KEY"] and "secrets" not in spec
    assert spec["volumes"] == [{"type": "bucket", "source": "me/runs", "mountPath": "/artifacts"}]
    assert "--artifacts /artifacts" in spec["script"]


def test_an_image_and_a_bucket_must_be_named(composer, tmp_path):
    done = composer("run", "--preset", tmp_path / "small.toml", "--on", "hf-jobs")
    assert done.returncode == 2 and all(f"the setting on.{name}" in done.stderr for name in ("image", "bucket"))


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("collect.policy.model=./student", True),
        ("collect.policy.model=vllm:./student", True),
        ("collect.policy.model=FOLDER", True),
        ("collect.policy.model=/artifacts/models/student", False),
        ("collect.policy.model=OWNER/student", False),
    ],
)
def test_a_path_on_this_machine_is_refused(composer, tmp_path, setting, refused):
    (tmp_path / "student").mkdir()
    words = ["--set", "on.image=i", "--set", "on.bucket=a/b"]
    setting = setting.replace("FOLDER", str(tmp_path / "student"))
    done = composer("run", "--preset", "demo", "--on", "hf-jobs", "--dry-run", *words, "--set", setting)
    assert done.returncode == (2 if refused else 0)
    assert ("lies on this machine, which hf-jobs does not see" in done.stderr) == refused, done.stderr
