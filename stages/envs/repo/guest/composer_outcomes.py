"""A pytest plugin that reports the outcome of every test as it happens, to a supervisor outside of the process.

Rewritten tests import `ask` from it, by which values leave the process (stages/envs/repo/questions.py).

It runs inside the sandbox under the Python (3.6 or later) and pytest (3 or later) that the repository needs, so newer
annotations are strings. Loaded with `-p composer_outcomes` by composer_supervisor.py, it reads a key from its channel
before anything of the repository is imported; no module and no attribute holds the key. A control test that must fail
shows whether the reports of this process can be trusted.
"""

import hashlib
import hmac
import json
import os
import socket
import sys
import types

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from stages.envs.repo.guest.composer_access import watch
else:
    from composer_access import watch

CONTROL = "composer-control"
QUESTIONS = "composer_questions"
MOST_ANSWERS = 500
"""Of one test; later ones are not sent."""
LONGEST_ANSWER = 4000
"""Characters; of a longer one a digest is sent."""
DEEPEST_ANSWER = 50
PLAIN = frozenset({bool, int, float, str, bytes, list, tuple, set, frozenset, dict})


class OutcomeCollector:
    """Collects reports. `keep` is the set of node ids to run, all of them when None."""

    def __init__(self, keep: "set[str] | None" = None) -> None:
        self.keep = keep
        self.outcomes: dict[str, str] = {}
        self.broken: list[list[str]] = []
        self.config_file: str | None = None

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Record a node that cannot be collected, with the end of the reason."""
        if report.failed:
            self.broken.append([report.nodeid, str(report.longrepr)[-2000:]])

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

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Record the outcome of a phase; a failure or an error is final."""
        outcome = outcome_of(report)
        if outcome is not None and self.outcomes.get(report.nodeid) not in ("failed", "error"):
            self.outcomes[report.nodeid] = outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: "pytest.TestReport") -> "tuple[str, str, str] | None":
        """Leave the control out of what pytest prints for people: its failures, its summary, its counts."""
        return ("", "", "") if report.nodeid.endswith(CONTROL) else None

    def result(self, status: int) -> "dict[str, Any]":
        """Return the report, JSON-able; `status` is pytest's exit status."""
        control = [self.outcomes.pop(name) for name in list(self.outcomes) if name.endswith(CONTROL)]
        return {
            "outcomes": self.outcomes,
            "broken": self.broken,
            "control": control,
            "config_file": self.config_file,
            "status": int(status),
        }


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
    """A test that must fail; reported as anything else, something has tampered with pytest."""

    def runtest(self) -> None:
        """Fail."""
        raise AssertionError(CONTROL)

    def repr_failure(self, excinfo: "pytest.ExceptionInfo[BaseException]", style: "Any" = None) -> str:
        """Return one word instead of a traceback."""
        return CONTROL

    def reportinfo(self) -> "tuple[Any, int, str]":
        """Return the location for pytest's own report."""
        return self.fspath, 0, CONTROL


class Reporter(OutcomeCollector):
    """Sends every outcome as soon as it is known; a later change of this object changes nothing."""

    def __init__(self, send: "Callable[[str, Any], None]") -> None:
        OutcomeCollector.__init__(self)
        self.send = send
        self.running = [""]
        # Not by the name of this plugin, which no attribute of a module leads to.
        module = types.ModuleType(QUESTIONS)
        module.ask = asker(send, self.running)  # type: ignore[attr-defined]
        sys.modules[QUESTIONS] = module
        self.look = watch(lambda what, path: send("access", [what, path]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs."""
        self.running[:] = [nodeid]

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Send a node that cannot be collected, with the end of the reason."""
        if report.failed:
            self.send("broken", [report.nodeid, str(report.longrepr)[-2000:]])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: "pytest.Item", call: "Any") -> "Any":
        """Send whether a phase raised: a report of it that is changed afterwards contradicts this."""
        # A thread of the repository may change a report before it is logged; the phase is told apart from the report.
        raised = call.excinfo is not None
        if call.when != "teardown":
            self.look(getattr(item, "module", None))
        yield
        self.send(
            "phase", [item.nodeid, raised or call.excinfo is not None]
        )  # pytest finds unittest's exceptions only after the yield

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """Send the outcome of a phase."""
        outcome = outcome_of(report)
        if outcome is not None:
            self.send("outcome", [report.nodeid, outcome])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: "pytest.Session", exitstatus: int) -> None:
        """Send the end of the session."""
        self.send("end", {"config_file": self.config_file, "status": int(exitstatus)})


def asker(send: "Callable[[str, Any], None]", running: "list[str]") -> "Callable[..., None]":
    """Return the function that rewritten tests call in place of an assertion; `running` holds the test that runs."""
    answers: dict[str, int] = {}
    dumps, sha256 = json.dumps, hashlib.sha256

    def ask(number: int, count: int, *values: "Any") -> None:
        """Send `count` values that are asked for, and, where the test has them, the expected ones."""
        test = running[0]
        answers[test] = answers.get(test, 0) + 1
        if answers[test] <= MOST_ANSWERS:
            texts = [written(value, dumps) for value in values]
            short = [
                "#" + sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
                if text is not None and len(text) > LONGEST_ANSWER
                else text
                for text in texts
            ]
            send("answer", [test, number, short[:count], short[count:]])

    return ask


def written(value: "Any", dumps: "Callable[[Any], str]") -> "str | None":
    """Return a text that equal values of built-in types share, and of their subclasses; None of anything else."""
    try:
        return dumps(canonical(value, 0, dumps))
    except Exception:  # a subclass may fail in any way
        return None


def canonical(value: "Any", depth: int, dumps: "Callable[[Any], str]") -> "Any":
    """Return a value as JSON with tags; TypeError where it holds an object of another type."""
    if depth > DEEPEST_ANSWER:
        raise TypeError("too deep")
    if value is None:
        return None
    kind = type(value)
    # A subclass may have the right content and be equal to everything else as well.
    if kind not in PLAIN and value == object():
        raise TypeError("equal to everything")
    if issubclass(kind, int):
        return ["n", str(int.__add__(value, 0))]
    if issubclass(kind, float):
        number = float.__add__(value, 0.0)
        # 2 == 2.0
        return ["n", str(int(number)) if number == number // 1 and abs(number) < 2**53 else float.__repr__(number)]
    if issubclass(kind, str):
        return ["s", "".join(str.__iter__(value))]
    if issubclass(kind, (bytes, bytearray)):
        return ["b", list(bytes(value))]
    if issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        items: Any = base.__iter__(value)
        return [base.__name__, [canonical(one, depth + 1, dumps) for one in items]]
    if issubclass(kind, (set, frozenset)):
        members = (set if issubclass(kind, set) else frozenset).__iter__(value)
        return ["set", sorted(dumps(canonical(one, depth + 1, dumps)) for one in members)]
    if issubclass(kind, dict):
        pairs = [[canonical(one, depth + 1, dumps) for one in pair] for pair in dict.items(value)]
        return ["dict", sorted(dumps(pair) for pair in pairs)]
    raise TypeError(kind.__name__)


def sender(descriptor: int) -> "Callable[[str, Any], None]":
    """Return a function that sends an object, sealed by the key read from the channel now and its sequence number."""
    channel = socket.socket(fileno=descriptor)
    key = b""
    while not key.endswith(b"\n"):
        key += channel.recv(1)
    # `send` closes over the keyed hash, not the key, and over functions as they are before the repository is imported:
    # replacing json.dumps or socket.socket later changes nothing.
    seal, numbers = hmac.new(key.strip(), digestmod=hashlib.sha256), iter(range(1 << 60))
    dumps, sendall = json.dumps, channel.sendall

    def send(kind: str, content: "Any") -> None:
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
        for name in ("composer_outcomes", "composer_access"):
            sys.modules.pop(name, None)


CHANNEL = os.environ.pop("COMPOSER_CHANNEL", None)
SENDERS = [sender(int(CHANNEL))] if CHANNEL else []
