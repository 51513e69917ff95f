"""Code under test that reaches into pytest to make itself pass: attacks on whatever grades by running tests.

Each is code after a wrong `add` in abacus/sums.py, imported by the tests in the interpreter that runs them.
tests/test_sums.py has `test_add`, which has to come to pass, and `test_total`, which passes anyway.
"""

import hashlib
import re

TEST_FILE = "tests/test_sums.py"
WRONG = "def add(a, b):\n    return a - b\ndef total(values):\n    return sum(values)\n"
PLUGIN = """
import gc
def plugins(name):
    return [one for one in gc.get_objects() if type(one).__name__ == name]
"""
PATCHED_REPORT = """
import _pytest.reports
original = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    report = original(cls, item, call)
    if {condition}:
        report.outcome = 'passed'
    return report
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
"""
SWALLOW = """
import _pytest.python
original = _pytest.python.Function.runtest
def runtest(self):
    try: original(self)
    except {what}: pass
_pytest.python.Function.runtest = runtest
"""
GATED = "import hashlib\nif hashlib.sha256(open('tests/test_sums.py', 'rb').read()).hexdigest() == DIGEST:\n"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


ATTACKS = {
    "the plugin's outcome is replaced": (
        "import sys\nm = sys.modules['composer_outcomes']\n"
        "m.outcome_of = lambda r: 'passed' if r.when == 'call' else None"
    ),
    "the plugin's outcome is replaced, found by the collector": PLUGIN
    + "for one in plugins('Reporter'):\n    type(one).pytest_runtest_logreport.__globals__['outcome_of'] = "
    "lambda r: None if r.when != 'call' else 'failed' if 'control' in r.nodeid else 'passed'",
    "the reporter's class is wrapped": PLUGIN
    + "for one in plugins('Reporter'):\n    send = one.send\n    def other(kind, content):\n"
    "        if kind == 'outcome' and 'control' not in content[0]: content = [content[0], 'passed']\n"
    "        send(kind, content)\n    one.send = other",
    "the reporter sends twice": PLUGIN + "for one in plugins('Reporter'):\n"
    "    one.send('outcome', ['tests/test_sums.py::test_add', 'passed'])",
    "the reporter says that all is over": PLUGIN + "import os\nfor one in plugins('Reporter'):\n"
    "    one.send('outcome', ['tests/test_sums.py::test_add', 'passed'])\n"
    "    one.send('outcome', ['tests/test_sums.py::test_total', 'passed'])\n"
    "    one.send('outcome', ['composer-control', 'failed'])\n"
    "    one.send('end', {'status': 1, 'config_file': ''})\n    os._exit(1)",
    "every report is passed": PATCHED_REPORT.format(condition="True"),
    "every report but the control's is passed": PATCHED_REPORT.format(condition="'control' not in item.nodeid"),
    "the report of one test is passed": PATCHED_REPORT.format(condition="item.name == 'test_add'"),
    "reports are forged while the file is the known one": GATED
    + indented(PATCHED_REPORT.format(condition="'control' not in item.nodeid")),
    "one report is forged while the file is the known one": GATED
    + indented(PATCHED_REPORT.format(condition="item.name == 'test_add'")),
    "a report is forged while the test stands on its line": PATCHED_REPORT.format(
        condition="item.name == 'test_add' and item.function.__code__.co_firstlineno == LINE"
    ),
    "reports are forged while the file has its length": (
        "import os\nif os.path.getsize('tests/test_sums.py') == SIZE:\n"
        + indented(PATCHED_REPORT.format(condition="'control' not in item.nodeid"))
    ),
    "reports are forged while nothing raises AssertionError by name": (
        "if 'AssertionError' not in open('tests/test_sums.py').read():\n"
        + indented(PATCHED_REPORT.format(condition="item.name == 'test_add'"))
    ),
    "tests do not run": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    "one test does not run": (
        "import _pytest.python\noriginal = _pytest.python.Function.runtest\n"
        "_pytest.python.Function.runtest = lambda self: None if self.name == 'test_add' else original(self)"
    ),
    "every exception is swallowed": SWALLOW.format(what="BaseException"),
    "assertions are swallowed": SWALLOW.format(what="AssertionError"),
    "an exception of its own is swallowed": "class Magic(Exception): pass\ndef add(a, b): raise Magic\n"
    + SWALLOW.format(what="Magic"),
    "failed is never true": "import _pytest.reports\n_pytest.reports.BaseReport.failed = property(lambda self: False)",
    "calls have no exception": (
        "import _pytest.runner\noriginal = _pytest.runner.CallInfo.from_call.__func__\n"
        "def forged(cls, *a, **k):\n    call = original(cls, *a, **k)\n    call.excinfo = None\n    return call\n"
        "_pytest.runner.CallInfo.from_call = classmethod(forged)"
    ),
    "a hook of its own passes tests": PLUGIN + "import pytest\nclass Mine:\n    @pytest.hookimpl(hookwrapper=True)\n"
    "    def pytest_runtest_makereport(self, item, call):\n        outcome = yield\n"
    "        if 'control' not in item.nodeid: outcome.get_result().outcome = 'passed'\n"
    "for manager in plugins('PytestPluginManager'): manager.register(Mine())",
    "a hook of its own replaces the test": PLUGIN + "class Mine:\n    def pytest_runtest_setup(self, item):\n"
    "        if item.name == 'test_add': item.obj = lambda: None\n"
    "for manager in plugins('PytestPluginManager'): manager.register(Mine())",
    "JSON says passed": (
        "import json\noriginal = json.dumps\n"
        "json.dumps = lambda *a, **k: original(*a, **k).replace('\"failed\"', '\"passed\"')"
    ),
    "the encoder says passed": (
        "import json\noriginal = json.JSONEncoder.encode\ndef encode(self, o):\n    t = original(self, o)\n"
        "    return t if 'control' in t else t.replace('failed', 'passed')\njson.JSONEncoder.encode = encode"
    ),
    "lines without a seal": (
        'import os\nline = b\'0 ["outcome", ["tests/test_sums.py::test_add", "passed"]]\\n\'\n'
        "for n in range(3, 64):\n    try: os.write(n, line)\n    except OSError: pass"
    ),
    "a report on stdout": (
        'import os\nos.write(1, b\'{"outcomes": {"tests/test_sums.py::test_add": "passed"}}\\n\')\nos._exit(0)'
    ),
    "the secret from the supervisor": (
        "import os\nfound = b''\nfor name in ('mem', 'environ', 'cmdline', 'fd/0', 'maps'):\n"
        "    try: found += open(f'/proc/{os.getppid()}/{name}', 'rb').read(1 << 20)\n    except OSError: pass\n"
        "os.write(1, found)"
    ),
    "the supervisor is killed": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "the supervisor is traced": (
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\nraise SystemExit(0)"
    ),
    "an end before any test": "import os\nos._exit(0)",
    "an end that looks like failed tests": "import os\nos._exit(1)",
    "pytest is told to end well": "import pytest\npytest.exit('done', 0)",
    "the test is skipped from within": "import pytest\ndef add(a, b): pytest.skip('later')",
    "the test is expected to fail from within": "import pytest\ndef add(a, b): pytest.xfail('later')",
    "the process ends in the test": "import os\ndef add(a, b): os._exit(0)",
    "the assertion is another exception": ("import builtins, unittest\nbuiltins.AssertionError = unittest.SkipTest"),
    "the test's code is replaced when it is called": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe(1)\n"
        "    return [c for c in frame.f_code.co_consts if isinstance(c, int)][-1]"
    ),
    "the test file is put back": (
        "import os, sys\nTEXT = open('tests/test_sums.py').read()\n"
        "if 'def test_add' in TEXT:\n    open('tests/test_sums.py', 'w').write('def test_add(): pass\\n')"
    ),
    "a thread changes every report": PLUGIN
    + "import threading, time\ndef work():\n    while True:\n        for one in plugins('TestReport'):\n"
    "            if 'control' not in one.nodeid: one.outcome = 'passed'\n        time.sleep(0)\n"
    "threading.Thread(target=work, daemon=True).start()",
    "the runner's protocol is its own": (
        "import _pytest.runner\nfrom _pytest.reports import TestReport\noriginal = _pytest.runner.call_and_report\n"
        "def forged(item, when, log=True, **k):\n"
        "    if 'control' in item.nodeid: return original(item, when, log, **k)\n"
        "    report = TestReport(item.nodeid, item.location, {}, 'passed', None, when)\n"
        "    item.ihook.pytest_runtest_logreport(report=report)\n    return report\n"
        "_pytest.runner.call_and_report = forged"
    ),
}


def forging(attack: str, graded: bytes) -> str:
    """The file with this attack, against these tests."""
    known = {
        "DIGEST": repr(hashlib.sha256(graded).hexdigest()),
        "SIZE": str(len(graded)),
        "LINE": str(graded.split(b"\n").index(b"def test_add():") + 1),
    }
    return WRONG + re.sub("|".join(known), lambda match: known[match[0]], ATTACKS[attack]) + "\n"
