"""A fake of Hugging Face Jobs on loopback that really runs the commands, as its documentation says.

A job is a command in a container: here a process in bubblewrap that sees this machine's programs, its own /tmp, the
bucket's folder where the volume is mounted, and of the environment nothing but what the job was given. A launch that
fails, is killed or outlives its time counts as an attempt, and the next one begins anew.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from support.container import container
from support.loopback import Handler, listening

OWNER = "me"
FIELDS = {
    "command",
    "arguments",
    "environment",
    "flavor",
    "secrets",
    "timeoutSeconds",
    "attempts",
    "labels",
    "volumes",
    "dockerImage",
}
FLAVORS = {"cpu-basic", "a10g-small", "h200"}


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
        if asked["flavor"] not in FLAVORS:
            return 400, f"Unknown flavor {asked['flavor']}"
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
