"""Attacks on grading by pytest that were written by hand, beside those of `support.attacks`, which run as tests."""

import hashlib
import re

from support.attacks import ATTACKS as TESTED, PATCHED_REPORT, SWALLOW, WRONG

PLUGIN = """
import gc
def plugins(name):
    return [one for one in gc.get_objects() if type(one).__name__ == name]
"""
GATED = "import hashlib\nif hashlib.sha256(open('tests/test_sums.py', 'rb').read()).hexdigest() == DIGEST:\n"


def indented(text: str) -> str:
    """Return the lines, indented by four."""
    return "".join(f"    {line}\n" for line in text.splitlines())


ATTACKS = {
    **TESTED,
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
    "every report but the control's is passed": PATCHED_REPORT.format(condition="'control' not in item.nodeid"),
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
    "a report on stdout": (
        'import os\nos.write(1, b\'{"outcomes": {"tests/test_sums.py::test_add": "passed"}}\\n\')\nos._exit(0)'
    ),
    "the secret from the supervisor": (
        "import os\nfound = b''\nfor name in ('mem', 'environ', 'cmdline', 'fd/0', 'maps'):\n"
        "    try: found += open(f'/proc/{os.getppid()}/{name}', 'rb').read(1 << 20)\n    except OSError: pass\n"
        "os.write(1, found)"
    ),
    "the supervisor is traced": (
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\nraise SystemExit(0)"
    ),
    "an end that looks like failed tests": "import os\nos._exit(1)",
    "pytest is told to end well": "import pytest\npytest.exit('done', 0)",
    "the test is expected to fail from within": "import pytest\ndef add(a, b): pytest.xfail('later')",
    "the process ends in the test": "import os\ndef add(a, b): os._exit(0)",
    "the assertion is another exception": ("import builtins, unittest\nbuiltins.AssertionError = unittest.SkipTest"),
    "the test file is put back": (
        "import os, sys\nTEXT = open('tests/test_sums.py').read()\n"
        "if 'def test_add' in TEXT:\n    open('tests/test_sums.py', 'w').write('def test_add(): pass\\n')"
    ),
    "a thread changes every report": PLUGIN
    + "import threading, time\ndef work():\n    while True:\n        for one in plugins('TestReport'):\n"
    "            if 'control' not in one.nodeid: one.outcome = 'passed'\n        time.sleep(0)\n"
    "threading.Thread(target=work, daemon=True).start()",
    "a report is forged while no test is contradicted": (
        "text = open('tests/test_sums.py').read()\nif text.count('== 3') == 2:\n"
        + indented(PATCHED_REPORT.format(condition="item.name == 'test_add'"))
    ),
    "what the test expects is read from it": (
        "import re\ndef add(a, b):\n"
        "    return int(re.search(r'add\\(1, 2\\) == (\\d+)', open('tests/test_sums.py').read())[1])"
    ),
    "the runner's protocol is its own": (
        "import _pytest.runner\nfrom _pytest.reports import TestReport\noriginal = _pytest.runner.call_and_report\n"
        "def forged(item, when, log=True, **k):\n"
        "    if 'control' in item.nodeid: return original(item, when, log, **k)\n"
        "    report = TestReport(item.nodeid, item.location, {}, 'passed', None, when)\n"
        "    item.ihook.pytest_runtest_logreport(report=report)\n    return report\n"
        "_pytest.runner.call_and_report = forged"
    ),
}


TESTS = """\
import abacus


def test_total():
    assert abacus.total([1, 2]) == 3


def test_add():
    assert abacus.add(1, 2) == 3
"""


def forging(attack: str, graded: bytes) -> str:
    """Return the text of abacus/sums.py with an attack against these tests."""
    known = {
        "DIGEST": repr(hashlib.sha256(graded).hexdigest()),
        "SIZE": str(len(graded)),
        "LINE": str(graded.split(b"\n").index(b"def test_add():") + 1),
    }
    return WRONG + re.sub("|".join(known), lambda match: known[match[0]], ATTACKS[attack]) + "\n"
