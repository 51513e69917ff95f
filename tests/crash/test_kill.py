"""`kill -9` in the middle under a limit of money, then `--resume`; `test_random_kills.py` kills every stage."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import save_tiny
from support.server import Reply, Server, answer, serving

from stages.runs import store
from stages.runs.run import Run, read_manifest

TESTS = Path(__file__).resolve().parents[1]
ENV = "support.environments:SlowEnv"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def composer(*words: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "composer_cli", *words], env=environment, stderr=subprocess.PIPE)


def finish(*words: str) -> None:
    process = composer(*words)
    assert process.wait(120) == 0, process.stderr.read().decode() if process.stderr else ""


def kill_when(words: list[str], ready: Callable[[], bool]) -> None:
    """Start a command and kill it once something is on disk, before it can end."""
    process = composer(*words)
    deadline = time.monotonic() + 90
    while not ready():
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def lines(root: Path, stage: str) -> list[bytes]:
    """Whole lines of all journals below a stage's folder, sealed or open, without check values."""
    found: list[bytes] = []
    for path in sorted(root.glob(f"{stage}/2*/steps/*")):
        found += store.sealed_lines(path) if path.suffix == ".gz" else store.open_lines(path)
    return found


def newest(root: Path, stage: str) -> Run:
    return Run(next(root.glob(f"{stage}/2*")))


@pytest.fixture
def server() -> Iterator[Server]:
    def reply(body: dict[str, Any], n: int) -> Reply:
        return Reply(body=answer(body["messages"][0]["content"].upper(), cost=0.01), delay_s=0.05)

    with serving(reply) as found:
        yield found


def test_a_limit_outlives_the_process(tmp_path: Path, model: Path, server: Server) -> None:
    """Killed twice and resumed with the same limit, a run pays no more than that, and says what it paid."""
    settings = ["--env", ENV, "--policy", str(model), "-s", "policy.max_tokens=60", "-s", "tasks=12", "-q"]
    finish("collect", *settings, "--artifacts", str(tmp_path))
    table = tmp_path / "teachers.toml"
    prices = "usd_per_mtok_in = 0.0\nusd_per_mtok_out = 156.25\nmax_tokens = 64\nconcurrency = 2\n"  # 0.01 USD a call
    table.write_text(f'[[teachers]]\nname = "t"\nmodel = "m"\nbase_url = "{server.url}"\n{prices}')
    words = ["replay-teachers", "--teachers", str(table), "-q", "--artifacts", str(tmp_path), "--max-cost", "0.1"]
    kill_when(words, lambda: len(lines(tmp_path, "replay-teachers")) >= 3)
    found = read_manifest(newest(tmp_path, "replay-teachers").path)
    assert found.status == "running"
    assert 0.01 * len(server.requests) <= found.cost_usd + found.possibly_usd + 1e-9 <= 0.1 + 1e-9
    assert found.cost_usd >= 0.03 - 1e-9
    before = len(server.requests)
    kill_when([*words, "--resume"], lambda: len(server.requests) > before)
    last = composer(*words, "--resume")
    assert last.wait(120) == 3
    assert before < len(server.requests) <= 10
    found = read_manifest(newest(tmp_path, "replay-teachers").path)
    assert 0.01 * len(server.requests) <= found.cost_usd + found.possibly_usd + 1e-9 <= 0.1 + 1e-9
