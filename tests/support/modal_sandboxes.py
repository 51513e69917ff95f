"""What the fake of Modal holds: volumes that are folders, secrets, and sandboxes that are processes in bubblewrap."""

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modal_proto import api_pb2

from support.container import container

SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
FAILURE = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
TIMEOUT = api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT


@dataclass
class Running:
    """A sandbox: what was asked for, its process, its output, and what ended it from outside."""

    id: str
    app_id: str
    asked: Any
    secrets: list[str]
    process: subprocess.Popen[str]
    lines: list[tuple[int, str]] = field(default_factory=list)
    """What it printed, each with its time in nanoseconds."""
    cut: int | None = None

    def kill(self, why: int, number: int = signal.SIGKILL) -> None:
        """End it from outside."""
        if self.process.poll() is None:
            self.cut = why
            os.killpg(self.process.pid, number)

    def result(self) -> Any:
        """What became of it; without a status while it runs."""
        code = self.process.poll()
        if code is None:
            return api_pb2.GenericResult()
        status = self.cut or (SUCCESS if code == 0 else FAILURE)
        return api_pb2.GenericResult(status=status, exitcode=code if code >= 0 else 128 - code)


@dataclass
class Modal:
    """The service: volumes are folders, secrets are variables."""

    token: tuple[str, str]
    volumes: dict[str, Path]
    secrets: dict[str, dict[str, str]]
    url: str = ""
    sandboxes: list[Running] = field(default_factory=list)
    images: dict[str, list[str]] = field(default_factory=dict)

    def launch(self, request: Any, secret_ids: list[str], form: str) -> Running:
        """The sandbox of a request; `form` is how the backend writes the number of a sandbox."""
        asked = request.definition
        mounts = {mount.mount_path: self.volumes[mount.volume_id.removeprefix("vo-")] for mount in asked.volume_mounts}
        given = {name: value for secret in asked.secret_ids for name, value in self.secrets[secret[3:]].items()}
        process = subprocess.Popen(
            [*container(mounts), *asked.entrypoint_args],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", **given},
            start_new_session=True,
        )
        running = Running(f"sb-{len(self.sandboxes):{form}}", request.app_id, asked, secret_ids, process)
        self.sandboxes.append(running)
        threading.Timer(asked.timeout_secs, running.kill, (TIMEOUT,)).start() if asked.timeout_secs < 60 else None
        threading.Thread(target=self._read, args=(running,), daemon=True).start()
        return running

    @staticmethod
    def _read(running: Running) -> None:
        for line in running.process.stdout or ():
            running.lines.append((time.time_ns(), line))
        running.process.wait()
