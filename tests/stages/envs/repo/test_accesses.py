# ruff: noqa: E501 - lines of programs
"""What the plugin records: each way by which code under test reads its tests or replaces what they run by, and no more."""

from pathlib import Path

import pytest
from support.sample_package import write

from stages.envs.repo import grading, runner
from stages.envs.repo.grading import TestOutcomes, TestRuntime, run_pytest

READING = {
    "gc": "import gc\ngc.get_objects()",
    "frame": "import sys\nsys._getframe()",
    "stack": "import inspect\ninspect.stack()",
    "walked": "import traceback\nnext(traceback.walk_stack(None))",
    "walked_tb": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError as e: next(traceback.walk_tb(e.__traceback__))",
    "logged": "import logging\nlogging.currentframe()",
    "debugged": "import bdb\nclass B(bdb.Bdb): pass\nb = B()\nb.set_trace()\nb.set_continue()\nimport sys\nsys.settrace(None)",
    "excinfo": "import _pytest._code.code as c\ntry: 1 / 0\nexcept ZeroDivisionError: c.ExceptionInfo.from_current().traceback[0].frame",
    "generator": "def g(): yield\ng().gi_frame",
    "opened": "open('tests/test_all.py').close()",
    "by_bytes": "open(b'tests/test_all.py').close()",
    "by_pathlib": "import pathlib\npathlib.Path('tests/test_all.py').read_text()",
    "by_descriptor": "import os\nos.close(os.open('tests/test_all.py', os.O_RDONLY))",
    "by_proc": "open('/proc/self/cwd/tests/test_all.py').close()",
    "by_symlink": "import os, tempfile\np = os.path.join(tempfile.mkdtemp(), 'x')\nos.symlink(os.path.abspath('tests/test_all.py'), p)\nopen(p).close()",
    "by_hard_link": "import os\nos.link('tests/test_all.py', 'x.txt')\nos.unlink('x.txt')",
    "by_loader": "import importlib.machinery as m\nm.SourceFileLoader('x', 'tests/test_all.py').get_source('x')",
    "by_cat": "import subprocess\nsubprocess.run(['cat', 'tests/test_all.py'], capture_output=True)",
    "forked": "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)",
    "ctyped": "import ctypes\nctypes.pythonapi.PyEval_GetFrame",
    "cast": "import ctypes\nctypes.cast(id(1), ctypes.POINTER(ctypes.c_ubyte))[0]",
    "cast_later": "import sys\nsys.modules['_ctypes'].POINTER",
    "importing_it": "import multiprocessing.sharedctypes as s\ns.ctypes.c_char_p",
    "memory": "open('/proc/self/mem', 'rb').close()",
    "memory_by_descriptor": "import os\nos.close(os.open('mem', os.O_RDONLY, dir_fd=os.open('/proc/self', os.O_RDONLY)))",
    "in_a_string": "exec('import sys\\nsys._getframe()')",
    "under_another_name": "import typing\nexec(compile('import sys\\nsys._getframe()', typing.__file__, 'exec'))",
    "testimony": "import gc\ngc.get_referrers(1)",
    "imported_elsewhere": "import sys, tempfile, pathlib\nd = tempfile.mkdtemp()\npathlib.Path(d, 'more_code.py').write_text('import ctypes\\nctypes.CDLL(None)')\nsys.path.append(d)\nimport more_code\nsys.path.remove(d)",
    "elsewhere": "import sys, tempfile, pathlib\nd = tempfile.mkdtemp()\npathlib.Path(d, 'other_code.py').write_text('import gc\\ngc.get_objects()')\nsys.path.append(d)\nimport other_code\nsys.path.remove(d)",
    "code_of_a_test": "import sys\nsys.modules['tests.test_all'].helper.__code__",
    "code_replaced": "import sys\nsys.modules['tests.test_all'].helper.__code__ = (lambda: 1).__code__",
}
HONEST = {
    "namedtuples": "import collections, typing, enum, dataclasses\nP = collections.namedtuple('P', 'x y', defaults=[1])\nclass N(typing.NamedTuple):\n    x: int = 1\nT = typing.TypeVar('T')\nE = enum.Enum('E', 'a b')\n@dataclasses.dataclass\nclass D:\n    x: int = 0\nD()",
    "logging_": "import logging, warnings, traceback\nlogging.getLogger('x').warning('text')\ntry: 1 / 0\nexcept ZeroDivisionError: logging.exception('text'); traceback.format_exc()",
    "wrapping": "import functools, inspect\ndef d(f):\n    @functools.wraps(f)\n    def w(*a): return f(*a)\n    w.__defaults__ = (1,)\n    return w\n@d\ndef g(x): return x\ninspect.signature(g), inspect.getsource(g), g.__code__, g.__wrapped__.__globals__",
    "classes": "class A: pass\nclass B: pass\nA().__class__ = B\nA.__name__ = 'C'\nA.__module__ = 'x'",
    "strings": "exec('x = 1'), eval('2'), compile('3', '<mine>', 'eval')\nimport ast\nast.parse('x')\nimport json.tool, csv, decimal",
    "files": "import pathlib, tempfile\np = pathlib.Path(tempfile.mkdtemp(), 'test_x.py')\np.write_text('x')\np.read_text(), pathlib.Path(__file__).read_text()",
    "importing": "import multiprocessing.sharedctypes, uuid",
    "signatures": "import inspect, sys\nf = sys.modules['tests.test_all'].helper\ninspect.signature(f), inspect.iscoroutinefunction(f)",
    "patching": "import json, functools\njson.dumps = functools.wraps(json.dumps)(lambda *a, f=json.dumps, **k: f(*a, **k))",
}
TESTS = """\
import importlib
import os
import unittest
import pytest


def helper():
    return 1


class TestIt(unittest.TestCase):
    def test_method(self):
        self.assertEqual(1, 1)


def test_all():
    for name in sorted(os.listdir('pkg')):
        if name[:2] != '__':
            importlib.import_module('pkg.' + name[:-3])


def test_after():
    assert len([1]) == 1
"""


def accesses(folder: Path, modules: dict[str, str]) -> tuple[TestOutcomes, set[str], set[str]]:
    """The outcomes of a real run, the modules to which accesses are attributed, and the accesses of unknown code."""
    write(folder, {f"pkg/{name}.py": text + "\n" for name, text in modules.items()})
    write(folder, {"pkg/__init__.py": "", "tests/__init__.py": "", "tests/test_all.py": TESTS})
    runtime = TestRuntime(lambda tree: runner.open_package_sandbox("bubblewrap", tree, grading.LIMITS, None))
    outcomes = run_pytest(runtime, folder, ["-q", "tests/test_all.py"])
    known = {path.removeprefix("pkg/").removesuffix(".py") for _, path in outcomes.accesses if path}
    return outcomes, known, {what for what, path in outcomes.accesses if not path}


def test_each_way_of_reading_is_recorded_under_its_file_and_honest_code_is_not(tmp_path: Path) -> None:
    outcomes, known, unknown = accesses(tmp_path, READING | HONEST)
    assert outcomes.statuses["tests/test_all.py::test_all"] == "passed", outcomes.log
    assert known - {"tests/test_all"} == set(READING), outcomes.accesses
    assert unknown == {"placed helper in tests/test_all.py"}, "its code was replaced"


PLACED = "import sys\nm = sys.modules['tests.test_all']\n"
REPLACING = {
    "replaced pytest.raises": "import pytest\npytest.raises = lambda *a, **k: __import__('contextlib').suppress(Exception)",
    "replaced builtins.len": "import builtins\nbuiltins.len = lambda one, was=len: was(one)",
    "replaced the module pytest": "import sys, types\nm = types.ModuleType('pytest')\nm.__dict__.update(vars(sys.modules['pytest']))\nsys.modules['pytest'] = m",
    "added Function.__getattribute__": "import _pytest.python as p\np.Function.__getattribute__ = lambda s, n: object.__getattribute__(s, n)",
    "placed len in tests/test_all.py": PLACED + "m.len = lambda one: 1",
    "placed pytest in tests/test_all.py": PLACED + "m.pytest = object()",
    "placed helper in tests/test_all.py": PLACED + "m.helper = lambda: 1",
    "placed TestIt.assertEqual in tests/test_all.py": PLACED + "m.TestIt.assertEqual = lambda *a: None",
}


@pytest.mark.parametrize(
    ("code", "recorded"),
    [("import ctypes", True), ("import _ctypes", True), ("import multiprocessing.sharedctypes", False)],
)
def test_an_import_of_ctypes_is_recorded_and_that_of_a_library_that_uses_it_is_not(
    tmp_path: Path, code: str, recorded: bool
) -> None:
    """Alone, because a second import in the same process raises no event."""
    _, known, _ = accesses(tmp_path, {"mine": code})
    assert ("mine" in known) is recorded


def test_each_replacement_is_recorded(tmp_path: Path) -> None:
    modules = {f"r{number}": code for number, code in enumerate(REPLACING.values())}
    outcomes, _, unknown = accesses(tmp_path, modules)
    assert set(REPLACING) <= unknown, outcomes.log


@pytest.mark.parametrize(
    "path", ["a/tests/b.py", "test_x.py", "x_test.py", "testimony.py", "src/test.py", "contest/x.py"]
)
def test_the_guest_knows_the_same_tests(path: str) -> None:
    from stages.envs.repo.guest import composer_access

    assert composer_access.is_test(path) == grading.is_test(path)
