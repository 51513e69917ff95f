"""A pytest plugin that reports the outcome of every test as it happens, to a supervisor outside of the process.

It runs inside the sandbox under the Python (3.6 or later) and pytest (3 or later) that the repository needs, so newer
annotations are strings. Imported by composer_pytest.py and loaded with `-p composer_outcomes`, it reads a key from its
channel before anything of the repository is imported; no module and no attribute holds the key. A control test that
must fail shows whether the reports of this process can be trusted.

PYTEST_DONT_REWRITE: pytest would warn that it comes too late to rewrite what is imported already.
"""

import gc
import hashlib
import hmac
import json
import os
import socket
import sys

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONTROL = "composer-control"


def outcome_of(report: "pytest.TestReport") -> "str | None":
    """Return the outcome of a test by the report of one phase; None while it is undecided."""
    expected = hasattr(report, "wasxfail")
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if expected else "skipped"
    if report.when == "call":
        return "xpassed" if expected else "passed"
    return None


class ControlItem(pytest.Item):
    """A test that must fail; any other outcome shows that something has tampered with pytest."""

    def runtest(self) -> None:
        """Fail."""
        raise AssertionError(CONTROL)

    def repr_failure(self, excinfo: "pytest.ExceptionInfo[BaseException]", style: "Any" = None) -> str:
        """Return one word instead of a traceback."""
        return CONTROL

    def reportinfo(self) -> "tuple[Any, int, str]":
        """Return the location for pytest's own report."""
        return self.fspath, 0, CONTROL


class Reporter:
    """Sends every outcome immediately, so that a later change of this object has no effect.

    `keep` is the set of node ids to run, all of them when None.
    """

    def __init__(self, send: "Callable[[str, Any], None]", keep: "set[str] | None" = None) -> None:
        self.send, self.keep = send, keep
        self.config_file: str | None = None

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Send a node that cannot be collected, with the end of the reason."""
        if report.failed:
            self.send("broken", [report.nodeid, str(report.longrepr)[-2000:]])

    # Last, so that no `-m` or `-k` in the configuration of the repository leaves the control out.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: "pytest.Session", config: "pytest.Config", items: "list[pytest.Item]"
    ) -> None:
        """Keep only the tests of `keep`, and add the control test."""
        # `inipath` in newer pytests, `inifile` in older ones.
        self.config_file = str(getattr(config, "inipath", None) or getattr(config, "inifile", None) or "")
        if self.keep is not None:
            items[:] = [item for item in items if item.nodeid in self.keep]
        if hasattr(ControlItem, "from_parent"):
            items.append(ControlItem.from_parent(session, name=CONTROL))
        else:  # older pytest
            items.append(ControlItem(CONTROL, session))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: "pytest.Item", call: "Any") -> "Any":
        """Send whether a phase raised: a report of it that is changed afterwards contradicts this."""
        # A thread of the repository may change a report before it is logged; the phase is sent separately.
        raised = call.excinfo is not None
        yield
        self.send(
            "phase", [item.nodeid, raised or call.excinfo is not None]
        )  # pytest finds unittest's exceptions only after the yield

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Send the outcome of a phase."""
        outcome = outcome_of(report)
        if outcome is not None:
            self.send("outcome", [report.nodeid, outcome])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: "pytest.TestReport") -> "tuple[str, str, str] | None":
        """Remove the control from the output of pytest: its failures, its summary, its counts."""
        return ("", "", "") if report.nodeid.endswith(CONTROL) else None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: "pytest.Session", exitstatus: int) -> None:
        """Send the end of the session."""
        self.send("end", {"config_file": self.config_file, "status": int(exitstatus)})


def sender(descriptor: int) -> "Callable[[str, Any], None]":
    """Return a function that sends an object, sealed by the key read from the channel now and its sequence number."""
    channel = socket.socket(fileno=descriptor)
    key = b""
    while not key.endswith(b"\n"):
        key += channel.recv(1)
    # `send` closes over the keyed hash, not the key, and over functions from before the repository is imported:
    # replacing json.dumps or socket.socket later has no effect.
    seal, numbers = hmac.new(key.strip(), digestmod=hashlib.sha256), iter(range(1 << 60))
    dumps, sendall, getpid, own_pid = json.dumps, channel.sendall, os.getpid, os.getpid()

    def send(kind: str, content: "Any") -> None:
        # A fork that does not end would repeat the same numbers, and run the remaining tests.
        if getpid() != own_pid:
            return
        body = dumps([kind, content]).encode("utf-8", "surrogatepass")
        line = seal.copy()
        line.update(b"%d " % next(numbers) + body)
        sendall(line.hexdigest().encode() + b" " + body + b"\n")

    return send


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: "pytest.Config") -> None:
    """Register the reporter before any conftest.py of the repository, which may import the code under test."""
    # pop, and no entry in sys.modules: neither the module nor `import` leads code under test to the sender.
    if SENDERS:
        early_config.pluginmanager.register(Reporter(SENDERS.pop()), "composer-reporter")
        sys.modules.pop("composer_outcomes", None)


CHANNEL = os.environ.pop("COMPOSER_CHANNEL", None)
SENDERS = [sender(int(CHANNEL))] if CHANNEL else []
# Off until here (composer_pytest.py). Imported objects live as long as the process and need not be collected.
if hasattr(gc, "freeze"):  # from Python 3.7 on
    gc.freeze()
gc.enable()
