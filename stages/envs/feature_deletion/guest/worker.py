"""Runs many test jobs in one sandbox: pytest is imported once, every job is a forked child that imports the package.

    python3 -P worker.py JOBS.json

Prints one JSON line: the result of each job, in order, and the CPU seconds of all of them. A job writes files over the
tree, runs tests, and has the files put back; `timeout_s` ends it with everything that it started.
"""

import compileall
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from py_compile import PycInvalidationMode
from typing import Any, NoReturn

os.environ["COMPOSER_WORKER"] = "1"

import pytest
from _pytest.config import default_plugins
from composer_outcomes import Outcomes  # type: ignore[import-not-found]  # found in the sandbox alone

os.environ["COVERAGE_FILE"] = os.path.join(tempfile.mkdtemp(), "coverage")

COVERAGE = ["-p", "pytest_cov", "--cov=.", "--cov-context=test", "--cov-report=", "--cov-config=/dev/null"]
USERS = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
COMPILED = os.path.join("__pycache__", "composer-compiled")
LOST: dict[str, Any] = {"outcomes": {}, "broken": [], "control": [], "config_file": None, "status": -1}


def prepare() -> None:
    """Import pytest's own plugins once for all jobs, and keep the garbage collector from going through them again."""
    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    gc.collect()
    gc.freeze()


def compile_once() -> None:
    """Bytecode of the tree for all jobs, half of whose time went into compiling.

    Python compares a digest of the source at every import: a removal is never run from what was compiled before it.
    """
    if not os.path.exists(COMPILED):
        compileall.compile_dir(os.getcwd(), quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        os.makedirs(os.path.dirname(COMPILED), exist_ok=True)
        write(COMPILED, b"")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of one job: what the plugin found, `timed_out`, and `duration_s`."""
    before = {path: read(path) for path in job["writes"]}
    started = time.monotonic()
    try:
        for path, text in job["writes"].items():
            write(path, text.encode("utf-8", "surrogateescape"))
        report, timed_out = in_child(job)
    finally:
        for path, data in before.items():
            write(path, data)
    result = json.loads(report) if report else LOST
    return {**result, "timed_out": timed_out, "duration_s": time.monotonic() - started}


def in_child(job: dict[str, Any]) -> tuple[bytes, bool]:
    """What the child wrote before it ended, and whether its time was over."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read_end)
        play(job, write_end)
    os.close(write_end)
    report, timed_out = drain(read_end, time.monotonic() + job["timeout_s"])
    os.close(read_end)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return report, timed_out


def drain(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """Everything up to the end of the pipe, and False; nothing, and True, when the deadline came first."""
    chunks: list[bytes] = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b"", True
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return b"".join(chunks), False
        chunks.append(chunk)


def play(job: dict[str, Any], write_end: int) -> NoReturn:
    """Be the child: run pytest silently and write what it found."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    keep = None if job["keep"] is None else set(job["keep"])
    outcomes = Outcomes(keep)
    status = -1
    try:
        status = pytest.main([*job["arguments"], *(COVERAGE if job["coverage"] else [])], plugins=[outcomes])
    finally:
        lines = executed() if job["coverage"] else {}
        data = json.dumps({**outcomes.result(status), "lines": lines}).encode()
        while data:
            data = data[os.write(write_end, data) :]
        os._exit(0)


def executed() -> dict[str, dict[str, list[int]]]:
    """File -> test -> the lines that the test executed, from the data of pytest-cov."""
    from coverage import CoverageData

    data = CoverageData(os.environ["COVERAGE_FILE"])
    data.read()
    found: dict[str, dict[str, list[int]]] = {}
    for path in data.measured_files():
        tests = found.setdefault(os.path.relpath(path), {})
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                test, bar, _ = context.rpartition("|")
                if bar:
                    tests.setdefault(test, []).append(line)
    return found


def read(path: str) -> bytes:
    """The bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def write(path: str, data: bytes) -> None:
    """Put bytes into a file."""
    with open(path, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    prepare()
    compile_once()
    results = [run(job) for job in jobs]
    print(json.dumps({"results": results, "cpu_s": sum(sum(resource.getrusage(who)[:2]) for who in USERS)}))
