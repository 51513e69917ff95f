"""Run many test jobs in one sandbox: pytest is imported once, every job is a forked child that imports the package.

    python3 -P worker.py JOBS.json

Prints one JSON line: the result of each job, in order. A job writes files over the tree, runs tests, and has the files
put back; `timeout_s` ends it with everything that it started.

A test that takes longer than its limit is considered to hang: the child is killed, the test recorded, and the job
started again without it, up to MOST_HANGING times.
"""

import compileall
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, NoReturn

import pytest
from _pytest.config import default_plugins
from composer_outcomes import CONTROL, Reporter  # type: ignore[import-not-found]  # found in the sandbox alone
from composer_supervisor import SealedReport  # type: ignore[import-not-found]

os.environ["COVERAGE_FILE"] = os.path.join(tempfile.mkdtemp(), "coverage")

# Not coverage's own dynamic_context=test_function, which names tests by function: inherited test methods collapsed, and
# 11 of 60 tasks of toolz had failing tests outside of the map from lines to tests.
COVERAGE = ["-p", "pytest_cov", "--cov=.", "--cov-context=test", "--cov-report=", "--cov-config=/dev/null"]
COMPILED = os.path.join("__pycache__", "composer-compiled")
MOST_HANGING = 4
SLOW_S = 0.5
"""Tests that take longer are reported with their duration."""
COLLECTION = ""
"""The name of the time before the first test."""
LOST: dict[str, Any] = {"outcomes": {}, "broken": [], "config_file": "", "status": -1, "lines": {}, "slow": {}}


def prepare() -> None:
    """Import pytest's own plugins and compile the tree, once for all jobs."""
    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    # Frozen objects are exempt from later collections, which would copy their memory pages in every child.
    gc.collect()
    gc.freeze()
    # Half the time of a job went into compiling. With checked hashes Python compares a digest of the source at every
    # import. A time stamp is not enough: an edit of the same size within a second would run from old bytecode, and a
    # right solution scored 0.2 on average over 20 rollouts.
    if not os.path.exists(COMPILED):
        compileall.compile_dir(os.getcwd(), quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        os.makedirs(os.path.dirname(COMPILED), exist_ok=True)
        Path(COMPILED).write_bytes(b"")


class HeartbeatReporter(Reporter):
    """Collects outcomes, writes to a pipe which test begins, and records how long slow ones took."""

    def __init__(self, keep: "set[str] | None", pipe: int) -> None:
        self.report = SealedReport("")  # of this process, which seals nothing
        super().__init__(self.report.record, keep)
        self.pipe, self.began = pipe, time.monotonic()
        self.slow: dict[str, float] = {}
        send(self.pipe, json.dumps(COLLECTION).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Announce a test; with the first one collection has ended."""
        if COLLECTION not in self.slow:
            self.slow[COLLECTION] = time.monotonic() - self.began
        self.began = time.monotonic()
        send(self.pipe, json.dumps(nodeid).encode() + b"\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the duration of a slow test with its set-up and tear-down."""
        if (took := time.monotonic() - self.began) > SLOW_S:
            self.slow[nodeid] = took


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one job: the plugin's report, `timed_out`, `hanging` and `slow` tests, and `duration_s`."""
    originals = {path: Path(path).read_bytes() for path in job["writes"]}
    started = time.monotonic()
    hanging: list[str] = []
    try:
        for path, text in job["writes"].items():
            Path(path).write_bytes(text.encode("utf-8", "surrogateescape"))
        while True:
            attempt_started, deadline = time.monotonic(), started + job["timeout_s"]
            report, hangs = run_child(job, hanging, deadline)
            hanging += [hangs] if hangs else []
            if not hangs or len(hanging) > MOST_HANGING or time.monotonic() >= deadline:
                break
    finally:
        for path, data in originals.items():
            Path(path).write_bytes(data)
    result = json.loads(report) if report else LOST
    return {
        **result,
        "timed_out": hangs is not None,
        "hanging": hanging,
        "duration_s": time.monotonic() - attempt_started,
    }


def run_child(job: dict[str, Any], hanging: list[str], deadline: float) -> tuple[bytes, "str | None"]:
    """Run a job in a forked child; return its report, and the test in which it hung, if any."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A group of its own, so that killpg below ends everything that the tests started.
        os.setsid()
        os.close(read_end)
        run_pytest(job, hanging, write_end)
    os.close(write_end)
    report, hangs = drain(read_end, deadline, job["hang_s"], job["hang_s_by_test"])
    os.close(read_end)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return report, hangs


def drain(descriptor: int, deadline: float, hang_s: float, by_test: dict[str, float]) -> tuple[bytes, "str | None"]:
    """Return the last line of a pipe; where a deadline comes before its end, nothing and the running test.

    A test has `hang_s` seconds, or its own limit in `by_test`; all of them together end at `deadline`.
    """
    pending, test, until = b"", COLLECTION, deadline
    while True:
        # The parent measures the time, out of reach of the code under test.
        ready, _, _ = select.select([descriptor], [], [], max(0.0, min(until, deadline) - time.monotonic()))
        if not ready:
            return b"", test
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return pending, None
        *lines, pending = (pending + chunk).split(b"\n")
        if lines:
            test = json.loads(lines[-1])
            until = time.monotonic() + by_test.get(test, hang_s)


def run_pytest(job: dict[str, Any], hanging: list[str], write_end: int) -> NoReturn:
    """Run pytest in the child, silently, and write its report."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    reporter = HeartbeatReporter(None if job["keep"] is None else set(job["keep"]) - set(hanging), write_end)
    without = [f"--deselect={test}" for test in hanging]
    status = -1
    try:
        status = pytest.main([*job["arguments"], *without, *(COVERAGE if job["coverage"] else [])], plugins=[reporter])
    finally:
        # In `finally`, with _exit: a SystemExit of the package must skip no report, nor reach the parent's loop.
        lines = executed_lines() if job["coverage"] else {}
        report = reporter.report.result(CONTROL)
        result = {"outcomes": report["outcomes"], "broken": report["broken"], "lines": lines, "slow": reporter.slow}
        result |= {"config_file": reporter.config_file or "", "status": int(status)}
        send(write_end, json.dumps(result).encode())
        os._exit(0)


def send(descriptor: int, data: bytes) -> None:
    """Write all bytes to a pipe, which may take a few at a time."""
    while data:
        data = data[os.write(descriptor, data) :]


def executed_lines() -> dict[str, dict[str, list[int]]]:
    """Return file -> test -> the lines that the test executed, from the data of pytest-cov."""
    from coverage import CoverageData

    data = CoverageData(os.environ["COVERAGE_FILE"])
    data.read()
    lines: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        tests = lines.setdefault(os.path.relpath(path), {})
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                test, bar, _ = context.rpartition("|")
                if bar:
                    tests.setdefault(test, []).append(line)
    return lines


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    prepare()
    print(json.dumps({"results": [run(job) for job in jobs]}))
