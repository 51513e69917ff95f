"""A pytest plugin that reports the outcome of every test as it happens, to a supervisor outside of the process.

It runs inside the sandbox under whatever Python (3.6 or later) and pytest (3 or later) the repository needs, so that
annotations of newer kinds are text. Started with `-p composer_outcomes` by composer_supervisor.py, it reads a key from
its channel before anything of the repository is imported; the key stands in no module and no attribute. A control test
that must fail tells whether the reports of this process can be believed.
"""

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


class Outcomes:
    """Collects reports. `keep` is the set of node ids to run, all of them when None."""

    def __init__(self, keep: "set[str] | None" = None) -> None:
        self.keep = keep
        self.outcomes: dict[str, str] = {}
        self.broken: list[list[str]] = []
        self.config_file: str | None = None
        self.num_deselected = 0

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Note what cannot be collected, with the end of the reason."""
        if report.failed:
            self.broken.append([report.nodeid, str(report.longrepr)[-2000:]])

    def pytest_collection_modifyitems(
        self, session: "pytest.Session", config: "pytest.Config", items: "list[pytest.Item]"
    ) -> None:
        """Leave only the tests of `keep`, and add the control test."""
        self.config_file = str(getattr(config, "inipath", None) or getattr(config, "inifile", None) or "")
        if self.keep is not None:
            items[:] = [item for item in items if item.nodeid in self.keep]
        items.append(control_item(session))

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Note the outcome of a phase; a failure or an error stays."""
        outcome = outcome_of(report)
        if outcome is not None and self.outcomes.get(report.nodeid) not in ("failed", "error"):
            self.outcomes[report.nodeid] = outcome

    def result(self, status: int) -> "dict[str, Any]":
        """The whole report, JSON-able; `status` is pytest's exit status."""
        control = [self.outcomes.pop(name) for name in list(self.outcomes) if name.endswith(CONTROL)]
        return {
            "outcomes": self.outcomes,
            "broken": self.broken,
            "control": control,
            "config_file": self.config_file,
            "status": int(status),
        }


def outcome_of(report: "pytest.TestReport") -> "str | None":
    """The outcome of a test by the report of one phase; None when that decides nothing yet."""
    expected = hasattr(report, "wasxfail")
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if expected else "skipped"
    if report.when == "call":
        return "xpassed" if expected else "passed"
    return None


class ControlItem(pytest.Item):
    """A test that must fail; when it is reported as anything else, something has tampered with pytest."""

    def runtest(self) -> None:
        """Fail."""
        raise AssertionError(CONTROL)

    def repr_failure(self, excinfo: "pytest.ExceptionInfo[BaseException]", style: "Any" = None) -> str:
        """One word instead of a traceback."""
        return CONTROL

    def reportinfo(self) -> "tuple[Any, int, str]":
        """Where it stands in pytest's own report."""
        return self.fspath, 0, CONTROL


def control_item(session: "pytest.Session") -> ControlItem:
    """The control test; older pytest has no `from_parent`."""
    if hasattr(ControlItem, "from_parent"):
        return ControlItem.from_parent(session, name=CONTROL)
    return ControlItem(CONTROL, session)


class Reporter(Outcomes):
    """Sends every outcome as soon as it is known; what is changed in this object later changes nothing."""

    def __init__(self, send: "Callable[[str, Any], None]") -> None:
        Outcomes.__init__(self)
        self.send = send

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Send what cannot be collected, with the end of the reason."""
        if report.failed:
            self.send("broken", [report.nodeid, str(report.longrepr)[-2000:]])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: "pytest.Item", call: "Any") -> "Any":
        """Send whether a phase raised, which a report of it that is changed afterwards contradicts."""
        raised = call.excinfo is not None
        yield
        self.send("phase", [item.nodeid, raised or call.excinfo is not None])  # of unittest's only pytest finds it

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Send the outcome of a phase."""
        outcome = outcome_of(report)
        if outcome is not None:
            self.send("outcome", [report.nodeid, outcome])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: "pytest.Session", exitstatus: int) -> None:
        """Say that everything was sent."""
        self.send("end", {"config_file": self.config_file, "status": int(exitstatus)})


def sender(descriptor: int) -> "Callable[[str, Any], None]":
    """What sends an object, sealed by a key that is read from the channel now and by its place in the order."""
    channel = socket.socket(fileno=descriptor)
    key = b""
    while not key.endswith(b"\n"):
        key += channel.recv(1)
    seal, numbers = hmac.new(key.strip(), digestmod=hashlib.sha256), iter(range(1 << 60))
    dumps, sendall = json.dumps, channel.sendall

    def send(kind: str, content: "Any") -> None:
        body = dumps([kind, content]).encode("utf-8", "surrogatepass")
        line = seal.copy()
        line.update(b"%d " % next(numbers) + body)
        sendall(line.hexdigest().encode() + b" " + body + b"\n")

    return send


def pytest_configure(config: "pytest.Config") -> None:
    """Called when loaded with `-p`, before any conftest.py of the repository."""
    if SENDERS:
        config.pluginmanager.register(Reporter(SENDERS.pop()), "composer-reporter")
        sys.modules.pop("composer_outcomes", None)


CHANNEL = os.environ.pop("COMPOSER_CHANNEL", None)
SENDERS = [sender(int(CHANNEL))] if CHANNEL else []
