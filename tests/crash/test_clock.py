"""The wall clock jumps a day forward and back while stages run: nothing is lost, awaited for a day or paid twice."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from support.command_line import PATHS, command, environment, settings
from support.models import save_tiny
from support.power_cut import compiled
from support.server import Reply, Server, answer, serving

from composer_stages.runs.kinds import STEP
from composer_stages.runs.run import Run

DAY_S = 24 * 60 * 60


class Clock:
    """The clock of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        library = compiled(Path(__file__).with_name("clock.c"))
        self.environment = environment(
            folder, LD_PRELOAD=str(library), CLOCK_OFFSET=str(self._offset), PYTHONPATH=PATHS
        )
        self.set(0)

    def set(self, seconds: int) -> None:
        """So much ahead of the real time, from now on, also for processes that run; below 0: behind."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    @contextmanager
    def jumping(self, every_s: float) -> Iterator[list[int]]:
        """A day forward, back, a day backward, back, and so on; gives the list of the jumps made."""
        over, made = threading.Event(), list[int]()

        def jump() -> None:
            for seconds in cycle((DAY_S, 0, -DAY_S, 0)):
                if over.wait(every_s):
                    return
                self.set(seconds)
                made.append(seconds)

        thread = threading.Thread(target=jump)
        thread.start()
        try:
            yield made
        finally:
            over.set()
            thread.join()
            self.set(0)


ENV = "support.environments:NumberedEnv"
EVERY_S, USD = 0.15, 0.01
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs("compiler")]


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


def said(clock: Clock, *words: object) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(*words), env=clock.environment, text=True, **streams) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def compare(clock: Clock, tmp_path: Path, stage: str, words: Sequence[str], codes: Sequence[int] = (0,)) -> Run:
    """A stage under a steady clock and under one that jumps: the same content, and no time out of all measure."""
    found = []
    for name, every_s in (("steady", 3600.0), ("jumping", EVERY_S)):
        began, root = time.monotonic(), tmp_path / name
        with clock.jumping(every_s) as jumps:
            code, _, err = said(clock, stage, *words, "--artifacts", root)
        assert code in codes, err
        run = Run(next(root.glob(f"{stage}/[12]*")))
        found.append((code, run.manifest.content, run.manifest.counts))
        assert 0 < run.manifest.seconds <= time.monotonic() - began
    assert found[0] == found[1] and len(jumps) > 8
    return run


def test_the_clock_of_a_process_jumps_and_what_counts_up_does_not(clock: Clock) -> None:
    told = "print(time.time(), time.monotonic(), flush=True)"
    script = f"import time; {told}; input(); {told}"
    words = [sys.executable, "-c", script]
    process = subprocess.Popen(words, env=clock.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    before = [float(word) for word in process.stdout.readline().split()]
    clock.set(-DAY_S)
    after = [float(word) for word in process.communicate("\n")[0].split()]
    clock.set(0)
    assert after[0] - before[0] == pytest.approx(-DAY_S, abs=60) and 0 <= after[1] - before[1] < 60


def busy(body: dict[str, Any], earlier: int) -> Reply:
    """Every third question is first refused for a moment."""
    if body["seed"] % 3 == 0 and earlier == 0:
        return Reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.3"})
    return Reply(body=answer(f"a{body['seed'] % 7}", cost=USD), delay_s=0.1)


def served(server: Server, **more: Any) -> dict[str, Any]:
    prices = {"usd_per_mtok_in": 0, "usd_per_mtok_out": 2000}
    return {"base_url": server.url, "max_tokens": 64, **prices, **more}


def words_of(table: dict[str, Any], prefix: str = "") -> list[str]:
    return settings(*(f"{prefix}{name}={value}" for name, value in table.items()))


def test_collect_from_a_server_that_asks_for_patience(clock: Clock, tmp_path: Path) -> None:
    with serving(busy) as server:
        policy = words_of(served(server, concurrency=2, timeout_s=30), "policy.")
        words = ["--env", ENV, "--policy", "m", "--max-cost", "9", *policy, *settings("tasks=12", "samples=3")]
        jumping = compare(clock, tmp_path, "collect", words)
    paid = USD * len(jumping.rows(STEP))
    assert (jumping.manifest.cost_usd, jumping.manifest.possibly_usd) == pytest.approx((paid, 0.0))


def test_evaluate_with_looks(clock: Clock, tmp_path: Path) -> None:
    with serving(busy) as server:
        arms = [word for arm in "AB" for word in words_of(served(server, model=arm), f"policies.{arm}.")]
        sizes = settings("tasks=14", "samples=2", "control=none", "with_start=false", "looks=2")
        compare(clock, tmp_path, "evaluate", ["--env", ENV, *arms, *sizes], codes=(0, 1, 3))


def test_training_sections_show_curves_losses_and_status(clock: Clock, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1}
    sizes = [*settings("policy.max_tokens=20", "tasks=4"), *words_of(size, "optimisation.")]
    jumping = compare(clock, tmp_path, "train", ["--env", ENV, "--policy", str(model), *sizes])
    ahead = datetime.fromisoformat(jumping.manifest.started_at) - datetime.now(UTC)  # by the jump that it began after
    clock.set(round(ahead.total_seconds()) - DAY_S)
    code, told, _ = said(clock, "status", "--artifacts", tmp_path / "jumping")
    clock.set(0)
    assert code == 0 and re.search(r"complete +0 s ", told), f"a run of tomorrow is new, not -86400 s old: {told}"
