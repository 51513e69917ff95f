"""Records what code under test does to its tests: reading their frames and files, searching memory, replacing pytest.

Part of the plugin composer_outcomes.py, under the same Pythons; before 3.8 only replacements are noticed. Whoever calls
is told by the audit events of Python, whose hooks nothing removes. A replacement in pytest raises no such event: it is
noticed by comparing what pytest consists of with what it was before the repository was imported.
"""

import os
import sys
import types
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SEARCHES = frozenset(
    {
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames"),
        *("sys.settrace", "sys.setprofile", "object.__setattr__", "code.__new__"),
    }
)
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
CODE = frozenset({"__code__", "__closure__", "__globals__", "f_code", "__defaults__", "__kwdefaults__"})
RUNNERS = frozenset(
    {
        *("_pytest.runner", "_pytest.python", "_pytest.reports", "_pytest.unittest", "_pytest.main", "_pytest.nodes"),
        *("_pytest.outcomes", "_pytest.skipping", "_pytest.doctest", "_pytest.assertion", "_pytest.assertion.rewrite"),
        *(
            "_pytest.raises",
            "_pytest.python_api",
            "pluggy._hooks",
            "pluggy._callers",
            "pluggy._manager",
            "pluggy._result",
        ),
        *("pluggy.hooks", "pluggy.callers", "pluggy.manager", "unittest.case"),
    }
)
"""Modules that decide outcomes: all functions and classes that they define are compared."""
OTHERS = {
    "builtins": ("AssertionError", "compile", "exec", "eval", "__import__", "isinstance", "issubclass"),
    "ast": ("parse", "walk", "NodeTransformer"),
    "sys": ("excepthook", "settrace", "setprofile"),
}
"""Other modules, and the names in them that are compared."""
METHODS = (types.FunctionType, classmethod, staticmethod, property)


def is_test(path: str) -> bool:
    """Return whether a path below the repository is that of a test."""
    parts = path.split("/")
    name = parts[-1]
    return bool({"tests", "test", "testing"} & set(parts[:-1])) or name.startswith(("test", "conftest"))


def watch(report: "Callable[[str, str], None]") -> "Callable[[], None]":
    """Report accesses from now on, each once, and return a function that looks for replacements in pytest."""
    root, seen = os.getcwd() + os.sep, set()
    busy: set[int] = set()
    getframe = sys._getframe

    def once(what: str, path: str) -> None:
        if (what, path) not in seen:
            seen.add((what, path))
            report(what, path)

    def belongs_to_tests(code: "Any") -> bool:
        path = getattr(code, "co_filename", root)
        return is_test(path[len(root) :]) if path.startswith(root) else "pytest" in path or "composer" in path

    def hook(event: str, arguments: "tuple[Any, ...]") -> None:
        if event not in SEARCHES and event not in ("object.__getattr__", "open") and event[:7] != "ctypes.":
            return
        thread = get_ident()
        if thread in busy:
            return
        busy.add(thread)
        try:
            frame: Any = getframe(1)
            # inspect.currentframe and its like are how code reads frames without naming sys.
            while frame is not None and frame.f_code.co_filename.endswith(("/inspect.py", "/linecache.py")):
                frame = frame.f_back
            path = "" if frame is None else frame.f_code.co_filename
            if not path.startswith(root) or is_test(path[len(root) :]):
                return
            what = event
            if event == "object.__getattr__":
                owner, name = arguments[0], arguments[1]
                code = owner if isinstance(owner, types.CodeType) else getattr(owner, "f_code", None)
                code = code or getattr(owner, "__code__", None)
                if name not in FRAMES and not (name in CODE and belongs_to_tests(code)):
                    return
                what = name
            elif event == "open":
                file = str(arguments[0])
                file = file[len(root) :] if file.startswith(root) else file
                if not file.endswith(".py") or file.startswith("/") or not is_test(file):
                    return
                what = "open of a test"
            once(what, path[len(root) :])
        except Exception:  # never into the code that is watched
            return
        finally:
            busy.discard(thread)

    if hasattr(sys, "addaudithook"):
        sys.addaudithook(hook)
    before = [(vars(owner), owner, name, value) for (owner, name), value in parts().items()]

    def look() -> None:
        for namespace, owner, name, value in before:
            if namespace.get(name) is not value:
                once("replaced {}.{}".format(getattr(owner, "__qualname__", owner.__name__), name), "")

    return look


def parts() -> "dict[tuple[Any, str], Any]":
    """Return the functions and classes that tests run by, with the functions of those classes, by owner and name."""
    found: dict[tuple[Any, str], Any] = {}
    for module_name, names in OTHERS.items():
        module = sys.modules.get(module_name)
        found.update({(module, name): getattr(module, name) for name in names if hasattr(module, name)})
    for module_name in RUNNERS & set(sys.modules):
        module = sys.modules[module_name]
        for name, value in list(vars(module).items()):
            if isinstance(value, (type, types.FunctionType)) and value.__module__ == module_name:
                found[module, name] = value
                if isinstance(value, type):
                    own = vars(value).items()
                    found.update({(value, part): method for part, method in own if isinstance(method, METHODS)})
    return found
