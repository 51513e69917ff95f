"""One run of pytest in a sandbox, and the outcome of every test.

Outcomes come from a plugin (guest/composer_outcomes.py) by way of a supervisor (guest/composer_supervisor.py), not from
the log: what a test prints is no outcome, a process that ends early reports nothing, and a report in which the control
test did not fail, or a line has the wrong seal, is not believed. Code under test shares a process with pytest, so this
is a high fence and not a wall: grading.py drops what an agent changed in files that pytest loads, and crosscheck.py
runs what passes once more.
"""

import json
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.sandbox import CommandResult, Limits, Sandbox

GUEST = Path(__file__).parent / "guest"
PASSING = frozenset({"passed", "xfailed"})
NEUTRAL = frozenset({"skipped"})
FAILING = frozenset({"failed", "error", "xpassed"})
WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
LIMITS = Limits(wall_s=600, cpu_s=600, memory_mb=4096, processes=256, file_mb=256, disk_mb=4096, output_bytes=16 << 20)
"""Of one run of tests; its report is part of the output."""

Statuses = dict[str, str]
"""Test name -> "passed", "xfailed", "xpassed", "skipped", "failed" or "error"; a test that did not report is absent."""


@dataclass(frozen=True)
class Outcomes:
    """What one run reported; nothing when the report is missing or `tampered`: control passed, or a seal is wrong."""

    statuses: Statuses
    tampered: bool
    log: str
    timed_out: bool = False
    broken: tuple[str, ...] = ()
    """Files and folders that could not be collected."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """The same by whole node id."""


@dataclass(frozen=True)
class TestRuntime:
    """Where tests run: how a sandbox on a folder is opened, and how the interpreter is called inside.

    `-P` keeps the work folder from shadowing the test runner; Pythons before 3.11 do not know it.
    """

    open: Callable[[Path], Sandbox]
    python: str = "python3 -P"

    def run(self, tree: Path, command: str) -> CommandResult:
        """One command in a fresh sandbox on a folder."""
        with self.open(tree) as sandbox:
            return sandbox.run(command)


def run_pytest(runtime: TestRuntime, tree: Path, arguments: Sequence[str], before: str = "") -> Outcomes:
    """Run pytest with our plugin on a folder of our own, after the shell commands `before`."""
    secret = secrets.token_hex(16)
    python = shlex.split(runtime.python)
    words = [python[0], "-I", "-S", str(GUEST / "composer_supervisor.py")]
    words += [*python, "-m", "pytest", "-p", "composer_outcomes", *arguments]
    # exec: beside the supervisor no process is left whose command line or memory holds the secret.
    result = runtime.run(tree, f"{before}exec {shlex.join(words)} <<'END'\n{secret}\nEND\n")
    return parse(result.output, secret, timed_out=result.timed_out)


def parse(log: str, secret: str, *, timed_out: bool = False) -> Outcomes:
    """The report in a log: the only line that starts with the secret. With a second such line none is believed."""
    reports = [line.removeprefix(secret) for line in log.splitlines() if line.startswith(secret)]
    without_reports = "\n".join(line for line in log.splitlines() if not line.startswith(secret))
    try:
        report: dict[str, Any] = json.loads(reports[0]) if len(reports) == 1 else {}
    except json.JSONDecodeError:
        report = {}
    believed = report.get("control") == ["failed"] and not report.get("tampered")
    tampered = len(reports) > 1 or (bool(report) and not believed)
    broken = tuple(path for path, _ in report.get("broken", ()))
    nodes = {} if tampered else report.get("outcomes", {})
    return Outcomes(by_name(nodes), tampered, without_reports, timed_out, broken, nodes)


def by_name(outcomes: Mapping[str, str]) -> Statuses:
    """Outcomes by the names of SWE-bench's lists: a node id up to its first blank, as `pytest -rA` is read there.

    Where several node ids share a name, one that does not pass decides.
    """
    statuses: Statuses = {}
    for node_id, outcome in outcomes.items():
        name = (node_id.split() or [""])[0]
        if statuses.get(name, "passed") in PASSING:
            statuses[name] = outcome
    return statuses
