# ruff: noqa: E501 - lines of programs
"""Honest solutions of many kinds, none of which a grading may call forged: rewrites of a fix, and files beside it."""

import ast
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from support.leetcode import ASSERTS, RIGHT

from composer_stages.envs.base import Task
from composer_stages.envs.kata.tasks import expression, rename_arguments, split_family

PATCHING = """
import functools as _functools, inspect as _inspect, json as _json, logging as _logging
_dumps = _json.dumps
@_functools.wraps(_dumps)
def _sorted_dumps(*a, **k): return _dumps(*a, **k)
_json.dumps = _sorted_dumps
_logging.Logger.composer_note = lambda self, text: self.debug(text)
_SIGNATURE = _inspect.signature(_sorted_dumps)
"""


class _Renamed(ast.NodeTransformer):
    """Renames the local variables of functions that hold neither closures nor names of the whole module."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Global, ast.Nonlocal)
        inside = [one for one in ast.walk(node) if one is not node]
        if any(isinstance(one, nested) for one in inside) or "locals" in ast.dump(node):
            return node
        parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        names = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} - parameters
        imported = {
            alias.asname or alias.name
            for one in inside
            for alias in getattr(one, "names", ())
            if not isinstance(one, nested)
        }
        for one in inside:
            if isinstance(one, ast.Name) and one.id in names - imported:
                one.id += "_value"
            elif isinstance(one, ast.ExceptHandler) and one.name in names:
                one.name += "_value"
        return node


REWRITES: dict[str, Callable[[str], str]] = {
    "gold": lambda text: text,
    "patching other modules": lambda text: text + PATCHING,
    "unparsed": lambda text: ast.unparse(ast.parse(text)) + "\n",
    "rename_arguments": lambda text: ast.unparse(_Renamed().visit(ast.parse(text))) + "\n",
    "with a helper": lambda text: text + "\n\ndef _identity(value: object) -> object:\n    return value\n",
}
"""Honest rewrites of the fixed file."""
LOCAL_PATCHING = """
import contextlib, io, logging, unittest.mock
with unittest.mock.patch("json.dumps", lambda *a: ""), contextlib.redirect_stdout(io.StringIO()):
    print("loaded")
logging.getLogger(__name__).addHandler(logging.NullHandler())
logging.getLogger(__name__).debug("loaded")
"""
TYPED = """
import collections, dataclasses, enum, typing
Pair = collections.namedtuple("Pair", "first second")
Kind = enum.Enum("Kind", "short long")
Text = typing.TypeVar("Text", bound=str)
@dataclasses.dataclass(frozen=True)
class Width:
    value: int = 12
"""
CACHED = """
import functools as _functools
initials, shorten, titled = (_functools.lru_cache(maxsize=None)(one) for one in (initials, shorten, titled))
"""
OTHER_CODE = r"""
import re

def titled(text):
    first, *others = (word.capitalize() for word in text.lower().split())
    return " ".join([first, *(one.lower() if one.lower() in {"of", "and", "the"} else one for one in others)])

def initials(author):
    if not (found := re.findall(r"(\S)\S*", author)):
        raise ValueError(author)
    return "".join(f"{letter.upper()}." for letter in found)

def shorten(text, width=12):
    width = max(width, 1)
    return text if len(text) <= width else text[:width - 1] + chr(0x2026)
"""
OTHER_ERROR = """
class AuthorError(ValueError):
    pass
_initials = initials
def initials(author):
    try:
        return _initials(author)
    except ValueError as error:
        raise AuthorError(f"no author in {author!r}") from error
"""
IN_A_CLASS = """
class Words:
    initials, shorten = map(staticmethod, (initials, shorten))
initials, shorten = Words.initials, Words.shorten
"""
HONEST_WORDS: dict[str, Callable[[str], str]] = REWRITES | {
    "patching for a time": lambda text: text + LOCAL_PATCHING,
    "typed": lambda text: text + TYPED,
    "cached": lambda text: text + CACHED,
    "written otherwise": lambda text: OTHER_CODE,
    "an exception of its own": lambda text: text + OTHER_ERROR,
    "indented by one": lambda text: ast.unparse(ast.parse(text)).replace("    ", " "),
    "in a class": lambda text: text + IN_A_CLASS,
}
"""Honest ways of writing the functions of the package on the shelf (`support.sample_package`) again."""

NEW_FILES = {
    "ctypes": (
        "import ctypes\nlibrary = ctypes.CDLL('libc.so.6')\nlibrary.abs.argtypes = [ctypes.c_int]\n"
        "class Pair(ctypes.Structure):\n    _fields_ = [('first', ctypes.c_int), ('second', ctypes.c_double)]\n"
        "def visit(): return library.abs(-3), ctypes.sizeof(Pair), Pair(1, 2.0).second, ctypes.create_string_buffer(8).raw"
    ),
    "sys._getframe": (
        "import sys\ndef visit():\n    frame = sys._getframe(1)\n"
        "    return frame.f_globals.get('__name__'), frame.f_lineno, sys._getframe().f_code.co_name"
    ),
    "inspect.currentframe": "import inspect\ndef visit(): return inspect.currentframe().f_back.f_lineno",
    "inspect": (
        "import inspect, json\ndef visit(value=1):\n    return inspect.signature(visit), inspect.getsource(visit), "
        "inspect.getdoc(json), inspect.isfunction(visit), inspect.getmembers(json.JSONEncoder, inspect.isfunction), "
        "inspect.iscoroutinefunction(visit), inspect.getmodule(visit), inspect.getfullargspec(visit), inspect.unwrap(visit)"
    ),
    "logging and warnings": (
        "import logging, warnings\nlog = logging.getLogger(__name__)\ndef visit():\n    log.debug('called')\n"
        "    log.warning('called %s', 1)\n    with warnings.catch_warnings(record=True):\n"
        "        warnings.simplefilter('always')\n        warnings.warn('old', DeprecationWarning, stacklevel=2)"
    ),
    "tracebacks": (
        "import sys, traceback\ndef visit():\n    try: 1 / 0\n    except ZeroDivisionError as error:\n"
        "        return traceback.format_exc(), sys.exc_info()[2].tb_lineno, error.__traceback__.tb_next, "
        "traceback.format_exception_only(type(error), error)"
    ),
    "types": (
        "import abc, collections, contextlib, dataclasses, enum, functools, typing\n"
        "Pair = collections.namedtuple('Pair', 'first second')\nKind = enum.Enum('Kind', 'short long')\n"
        "class Named(typing.NamedTuple):\n    name: str\n@dataclasses.dataclass(order=True)\nclass Width:\n    value: int = 12\n"
        "class Base(abc.ABC):\n    @abc.abstractmethod\n    def run(self): ...\n"
        "@functools.singledispatch\ndef show(value): return repr(value)\n@show.register\ndef _(value: int): return str(value)\n"
        "@contextlib.contextmanager\ndef opened(): yield 1\n"
        "def visit():\n    with opened(): return show(1), typing.get_type_hints(Width), Pair(1, 2), Named('x'), Width() < Width(13)"
    ),
    "threads and files": (
        "import concurrent.futures, json, pathlib, pickle, tempfile, threading, weakref\nlock = threading.RLock()\n"
        "with tempfile.TemporaryDirectory() as folder:\n    path = pathlib.Path(folder, 'test_notes.py')\n    path.write_text('[]')\n"
        "    notes = json.loads(path.read_text())\nwith concurrent.futures.ThreadPoolExecutor(2) as pool: notes += pool.map(abs, [-1])\n"
        "def visit():\n    with lock: return pickle.loads(pickle.dumps(notes)), weakref.ref(visit)()"
    ),
    "code that is made": (
        "import ast, importlib, re\nmade = {}\nexec('def double(value): return 2 * value', made)\n"
        "read = importlib.import_module('json').loads\n"
        "def visit(): return made['double'](2), eval('1 + 1'), ast.literal_eval('[1]'), re.sub('a', 'b', 'a'), read('1')"
    ),
    "patching": (
        "import functools, json, unittest.mock\n_dumps = json.dumps\n@functools.wraps(_dumps)\n"
        "def _sorted(*a, **k): return _dumps(*a, **k)\njson.dumps = _sorted\n"
        "def visit():\n    with unittest.mock.patch.object(json, 'loads', lambda text: text): return json.loads('x')"
    ),
}
"""Files beside a fix, by what they use. `visit` is called with every call of the function that was mended."""
VISITING = """
import functools as _functools, types as _types
{imported}
def _visited(function):
    @_functools.wraps(function)
    def call(*a, **k):
        _extra.visit()
        return function(*a, **k)
    return call if isinstance(function, _types.FunctionType) else function
_extra.visit()
{owner}{name} = _visited({look})
"""


def add_file(root: Path, path: str, qualname: str, using: str) -> None:
    """Write a new file beside a mended one, and have a function of that call it."""
    file = root / path
    (file.parent / "extra_code.py").write_text(NEW_FILES[using] + "\n")
    package, folder = [], file.parent
    while (folder / "__init__.py").exists() and folder != root:
        package.insert(0, folder.name)
        folder = folder.parent
    imported = f"from {'.'.join(package)} import extra_code as _extra" if package else "import extra_code as _extra"
    owner, _, name = qualname.rpartition(".")
    look = f"vars({owner})[{name!r}]" if owner else name
    owner = f"{owner}." if owner else ""
    file.write_text(file.read_text() + VISITING.format(imported=imported, owner=owner, name=name, look=look))


def kata_solution(task: Task, number: int) -> str:
    """Return a right solution of a kata, written in one of many ways."""
    rng, (operation, modifier) = random.Random(number), split_family(task.family)
    x, y = task.data["arguments"]
    code = rename_arguments(expression(operation.code, modifier, "x", "y", task.data["constant"]), (x, y))
    name = rng.choice(["value", "result", "answer"])
    before = rng.choice(
        [
            "",
            "import math",
            "import functools, inspect, json\njson.dumps = functools.wraps(json.dumps)(json.dumps)",
            "import sys\nCALLER = sys._getframe().f_globals['__name__']",
            "import inspect\nLINE = inspect.currentframe().f_lineno",
        ]
    )
    body = rng.choice(
        [
            f"    return {code}",
            f"    {name} = {code}\n    return {name}",
            f"    def helper():\n        return {code}\n    return helper()",
            f"    return (lambda {x}, {y}: {code})({x}, {y})",
        ]
    )
    return f"{before}\ndef {task.data['function']}({x}: int, {y}: int) -> int:\n{body}\n"


LEETCODE_BODIES = (
    RIGHT,
    "return sum(n for n in numbers)",
    "total = 0\nfor n in numbers:\n    total += n\nreturn total",
    "return reduce(lambda a, b: a + b, numbers, 0)",
    "import functools, operator\nreturn functools.reduce(operator.add, numbers, 0)",
    "import json, logging\nlogging.getLogger().debug(json.dumps(numbers))\nreturn sum(numbers)",
)
LEETCODE_TESTS = (
    (ASSERTS,),
    (),
    ("assert self.total([4]) == 4", "assert self.total([1, -1, 5]) == 5"),
    ("for n in range(1, 9):\n    assert self.total([n]) == n",),
    ("assert self.total([2, 3]) == 5, 'sum'",),
)


def leetcode_solutions() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield right answers to the problem `total`: body of the solution, and bodies of its tests."""
    return itertools.product(LEETCODE_BODIES, LEETCODE_TESTS)
