"""A model server as a process: waited for, ended with all it started, restarted a few times, gone when we are."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_stages.errors import InfrastructureError
from composer_stages.policy.server import MAX_RESTARTS, ModelServer

SCRIPT = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": []}')
worker = subprocess.Popen(["sleep", "1000"])
print("worker", worker.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(tmp_path: Path, script: str = SCRIPT, **more: object) -> ModelServer:
    listener: Callable[[str, int, int], None] = more.pop("listener", lambda *a: None)  # type: ignore[assignment]
    log = tmp_path / "logs" / "server.log"
    command = lambda port: [sys.executable, "-c", script, str(port)]  # noqa: E731
    return ModelServer("'toy'", command, os.environ, log, listener=listener, **more)  # type: ignore[arg-type]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[ModelServer]:
    one = server(tmp_path)
    one.start()
    yield one
    one.stop()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def worker(log: Path) -> int:
    return int(re.findall(r"^worker (\d+)", log.read_text(), re.M)[-1])


def soon(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def test_a_server_answers_after_start_and_ends_with_its_workers(tmp_path: Path) -> None:
    heard: list[str] = []
    one = server(tmp_path, "import time; time.sleep(1)\n" + SCRIPT, listener=lambda what, *n: heard.append(what))
    one.start()
    pid = one.pid
    assert one.alive() and "waiting for the server of 'toy'" in heard[0]
    one.stop()
    assert not one.alive() and gone(pid) and gone(worker(one.log))


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    one = server(tmp_path, "print('no such head size'); raise SystemExit(1)")
    with pytest.raises(InfrastructureError, match=r"ended before it answered.*no such head size"):
        one.start()


def test_a_stop_ends_the_wait_for_a_server(tmp_path: Path) -> None:
    def check() -> None:
        raise KeyboardInterrupt

    one = server(tmp_path, "import time; time.sleep(1000)", check=check)
    with pytest.raises(KeyboardInterrupt):
        one.start()
    assert not one.alive()


def test_a_killed_server_is_restarted_a_limited_number_of_times(started: ModelServer) -> None:
    url, workers = started.url, set()
    for _ in range(MAX_RESTARTS):
        workers.add(worker(started.log))
        os.kill(started.pid, signal.SIGKILL)
        assert soon(lambda: not started.alive())
        started.revive()
        assert started.alive() and started.url == url
        assert all(map(gone, workers)), "what a dead server left behind holds its memory"
    os.kill(started.pid, signal.SIGKILL)
    assert soon(lambda: not started.alive())
    with pytest.raises(InfrastructureError, match="died 4 times"):
        started.revive()


def test_a_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from composer_stages.policy.server import ModelServer
one = ModelServer("toy", lambda port: [sys.executable, "-c", {SCRIPT!r}, str(port)], os.environ,
                  Path({str(tmp_path / "log")!r}), listener=lambda *a: None)
one.start()
print(one.pid, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert soon(lambda: gone(pid) and gone(worker(tmp_path / "log")))


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_start_that_only_answers_with_errors_is_given_up(tmp_path: Path, status: int) -> None:
    refusing = SCRIPT.replace("self.send_response(200)", f"self.send_response({status})")
    one, began = server(tmp_path, refusing), time.monotonic()
    with pytest.raises(InfrastructureError, match="answers, but not with its models"):
        one.start()
    assert time.monotonic() - began < 15 and not one.alive()
