"""The wall clock jumps a day forward and back while stages run: nothing is lost, awaited for a day or paid twice."""

import os
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
from needs import needs, where
from support.models import save_tiny
from support.server import Reply, Server, answer, serving

from stages.runs.run import Run

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *found = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) abort();
    offset = found;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, told);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += *offset;
    return code;
}

int gettimeofday(struct timeval *told, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(told, zone);
    if (!code) told->tv_sec += *offset;
    return code;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
"""
DAY_S = 24 * 60 * 60


class Clock:
    """The clock of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._offset = folder / "clock.so", folder / "offset"
        (folder / "clock.c").write_text(SOURCE)
        words = [where("compiler"), "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"]
        subprocess.run(words, check=True)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}
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


TESTS = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(TESTS), str(TESTS.parent)])
ENV = "support.environments:NumberedEnv"
EVERY_S = 0.15
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs("compiler")]


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


def begin(clock: Clock, *words: str) -> subprocess.Popen[str]:
    environment = {**clock.environment, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "composer_cli", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(clock: Clock, *words: str) -> float:
    """Carry out a command; returns how many seconds it took by a clock that does not jump."""
    began, process = time.monotonic(), begin(clock, *words)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return time.monotonic() - began


def run(root: Path, stage: str) -> Run:
    return Run(next(root.glob(f"{stage}/[12]*")))


def content(found: Run) -> dict[str, str]:
    return {name: out["content_sha256"] for name, out in found.manifest.outputs.items()}


def settings(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in ("-s", f"{name.replace('__', '.')}={value}")]


def compare(clock: Clock, tmp_path: Path, stage: str, words: Sequence[str]) -> tuple[Run, Run]:
    """A stage under a steady clock and under one that jumps: the same content, and no time out of all measure."""
    finish(clock, stage, *words, "--artifacts", str(tmp_path / "steady"))
    with clock.jumping(EVERY_S) as jumps:
        took_s = finish(clock, stage, *words, "--artifacts", str(tmp_path / "jumping"))
    assert len(jumps) > 8
    steady, jumping = run(tmp_path / "steady", stage), run(tmp_path / "jumping", stage)
    assert content(steady) == content(jumping)
    assert 0 < jumping.manifest.seconds <= took_s
    assert jumping.manifest.counts == steady.manifest.counts
    assert (jumping.manifest.cost_usd, jumping.manifest.possibly_usd) == pytest.approx(
        (steady.manifest.cost_usd, steady.manifest.possibly_usd)
    )
    return steady, jumping


def test_the_clock_of_a_process_jumps_and_what_counts_up_does_not(clock: Clock) -> None:
    script = (
        "import time; print(time.time(), time.monotonic(), flush=True); input(); print(time.time(), time.monotonic())"
    )
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
    return Reply(body=answer(f"a{body['seed'] % 7}", cost=0.01), delay_s=0.1)


def served(server: Server) -> list[str]:
    about = {"base_url": server.url, "max_tokens": 64, "concurrency": 2, "timeout_s": 30, "usd_per_mtok_in": 0}
    return settings(**{f"policy__{name}": value for name, value in about.items()}, policy__usd_per_mtok_out=2000)


def test_collect_from_a_server_that_asks_for_patience(clock: Clock, tmp_path: Path) -> None:
    with serving(busy) as server:
        words = ["--env", ENV, "--policy", "m", "--max-cost", "9", *served(server), *settings(tasks=12, samples=3)]
        _, jumping = compare(clock, tmp_path, "collect", words)
    assert jumping.manifest.cost_usd > 0


def test_evaluate_with_looks(clock: Clock, tmp_path: Path) -> None:
    with serving(busy) as server:
        prices = {"usd_per_mtok_in": 0, "usd_per_mtok_out": 2000}
        arms = {name: {"model": name, "base_url": server.url, "max_tokens": 64, **prices} for name in "AB"}
        table = {f"policies__{arm}__{name}": value for arm, of in arms.items() for name, value in of.items()}
        about = settings(**table, tasks=14, samples=2, control="none", with_start="false", looks=2)
        finish_any = ["--env", ENV, *about]
        compare_any(clock, tmp_path, finish_any)


def compare_any(clock: Clock, tmp_path: Path, words: Sequence[str]) -> None:
    """As `compare`, for a verdict of any exit code."""
    found = []
    for name, every_s in (("steady", 3600.0), ("jumping", EVERY_S)):
        with clock.jumping(every_s):
            process = begin(clock, "evaluate", *words, "--artifacts", str(tmp_path / name))
            said = process.communicate(timeout=300)[1]
        assert process.returncode in (0, 1, 3), said
        found.append((process.returncode, content(run(tmp_path / name, "evaluate"))))
    assert found[0] == found[1]


def test_training_and_what_is_said_of_it(clock: Clock, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    size = {"steps": 6, "prompts_per_step": 2, "generations": 4, "save_every": 2, "threads": 1}
    sizes = settings(policy__max_tokens=20, tasks=4, **{f"optimisation__{name}": n for name, n in size.items()})
    _, jumping = compare(clock, tmp_path, "train", ["--env", ENV, "--policy", str(model), *sizes])
    ahead = datetime.fromisoformat(jumping.manifest.started_at) - datetime.now(UTC)  # by the jump that it began after
    clock.set(round(ahead.total_seconds()) - DAY_S)
    process = begin(clock, "status", "--artifacts", str(tmp_path / "jumping"))
    told = process.communicate(timeout=60)[0]
    clock.set(0)
    assert process.returncode == 0 and re.search(r"complete +0 s ", told), (
        f"a run of tomorrow is new, not -86400 s old: {told}"
    )
