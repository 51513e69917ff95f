"""Records what code under test does to its tests: reading their frames and files, searching memory, replacing pytest.

Part of the plugin composer_outcomes.py, under the same Pythons; before 3.8 only replacements are noticed. Accesses are
known from the audit events of Python, whose hooks nothing removes. A replacement raises no such event: it is noticed by
comparing what tests run by with what it was before the repository was imported, and the names of a test's module with
those that its source binds.

An access is attributed to the innermost file of the repository on the stack, so that no function of a library reads in
the name of code under test. Frames are the exception: logging and typing read them all the time, so only modules that
hand frames out are looked through.
"""

import ast
import builtins
import os
import sys
import types
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SEARCHES = frozenset(
    {
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.settrace", "sys.setprofile"),
        "sys.monitoring.register_callback",
    }
)
SPAWNS = frozenset(
    {
        *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"),
        "pty.spawn",
    }
)
"""In another process nothing is recorded: a child may read the tests."""
FILES = frozenset({"open", "os.link", "os.rename", "shutil.copyfile"})
FRAME_EVENTS = frozenset({"sys._getframe", "sys._current_frames", "sys._current_exceptions"})
CODE_MADE = frozenset({"code.__new__", "marshal.loads"})
"""Imports load code as well, in frames of Python's own."""
ATTRIBUTES = frozenset({"object.__getattr__", "object.__setattr__"})
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
CODE = frozenset({"__code__", "__closure__", "__globals__", "f_code", "__defaults__", "__kwdefaults__"})
LENDERS = (
    *("/inspect.py", "/linecache.py", "/bdb.py", "/pdb.py", "/trace.py", "/profile.py", "/cgitb.py"),
    "/asyncio/base_tasks.py",
)
"""Modules that read frames for their callers."""
LENDING = {
    "walk_stack": "/traceback.py",
    "walk_tb": "/traceback.py",
    "<lambda>": "/logging/__init__.py",
    "currentframe": "/logging/__init__.py",
}
"""Functions that return a frame to their caller, in modules that otherwise read frames for themselves."""
SIGNATURES = ("_signature_", "_has_code_flag")
"""How functions of inspect.py begin that read code objects and return no more than names of parameters."""
MEMORY = frozenset({"ctypes", "_ctypes", "cffi", "_cffi_backend", "_testcapi", "_testinternalcapi"})
"""Modules that read and write any memory, most of them (ctypes.cast, ctypes.c_char_p) without an event."""
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
    "ast": ("parse", "walk", "NodeTransformer"),
    "sys": ("excepthook", "settrace", "setprofile"),
}
"""Other modules, and the names in them that are compared."""
NAMESPACES = ("builtins", "pytest", "unittest")
"""Modules whose names tests use: all public ones are compared."""
METHODS = (types.FunctionType, classmethod, staticmethod, property)
DECIDING = ("__getattribute__", "__getattr__", "__call__", "__new__", "__init__")
MISSING = object()


def is_test(path: str) -> bool:
    """Return whether a path below the repository is that of a test (composer_rules.is_test, under older Pythons)."""
    parts = path.split("/")
    name = parts[-1]
    return (
        bool({"tests", "test", "testing", "__tests__"} & set(parts[:-1]))
        or name in ("conftest.py", "tests.py", "test.py")
        or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))
    )


def watch(report: "Callable[[str, str], None]") -> "Callable[[Any], None]":
    """Report accesses from now on, each once, and return a function that looks for replacements in a test's module."""
    root, seen = os.getcwd() + os.sep, set()
    folders = {os.path.dirname(one) for one in (os.__file__, __file__, pytest_file())} | {sys.prefix, sys.base_prefix}
    installed = tuple(folders.union(one for one in sys.path if os.path.isdir(one)) - {"/"})
    busy: set[int] = set()
    getframe, realpath, fsdecode, exists = sys._getframe, os.path.realpath, os.fsdecode, os.path.exists

    def once(what: str, path: str) -> None:
        if (what, path) not in seen:
            seen.add((what, path))
            report(what, path)

    def is_installed(path: str) -> bool:
        # Code with a file name of its own choice is not: it was compiled, or imported from elsewhere.
        return (path.startswith(installed) and not path.startswith(root)) or path.startswith("<frozen ")

    def is_runner(path: str) -> bool:
        return not path.startswith(root) and any(name in path for name in ("pytest", "pluggy", "composer_"))

    def belongs_to_tests(code: "Any") -> bool:
        path = getattr(code, "co_filename", root)
        return is_test(path[len(root) :]) if path.startswith(root) else is_runner(path)

    def repository_path(frame: "Any", through_imports: bool) -> "str | None":
        # The innermost file of the repository; "" for unknown code that nothing of the repository has called.
        unknown = False
        while frame is not None:
            path: str = frame.f_code.co_filename
            if path.startswith(root):
                return path[len(root) :]
            unknown = unknown or not is_installed(path)
            # What an installed module does when it is imported is its own: numpy opens libraries with ctypes.
            if path.startswith("<frozen importlib") and not unknown and not through_imports:
                return None
            frame = frame.f_back
        return "" if unknown else None

    def lends(frame: "Any") -> bool:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        return (
            not is_installed(path)
            or is_runner(path)
            or (path.endswith(LENDERS) and not (path.endswith("/inspect.py") and name.startswith(SIGNATURES)))
            or (path.endswith(LENDING.get(name, "\0")) and not is_installed(frame.f_back.f_code.co_filename))
        )

    def opened(arguments: "tuple[Any, ...]") -> "str | None":
        for one in arguments[:2]:
            if isinstance(one, (str, bytes)):
                # By its real path: /proc/self/cwd leads to the repository as well.
                path = realpath(fsdecode(one))
                # Without the folder, where it is opened below a descriptor.
                if path.endswith("/mem") and (path.startswith("/proc/") or not exists(path)):
                    return "open of memory"
                if path.endswith(".pyc"):
                    path = path.replace("__pycache__" + os.sep, "").partition(".")[0] + ".py"
                if path.startswith(root) and path.endswith(".py") and is_test(path[len(root) :]):
                    return "open of a test"
        return None

    def wants(frame: "Any") -> bool:
        # Whether code of the repository, or unknown code, imports a module, and not one that is being imported itself.
        while frame is not None:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if not is_installed(path):
                return True
            if name == "<module>" and "/ctypes/" not in path:
                return False
            frame = frame.f_back
        return False

    class Noticed(types.ModuleType):
        def __getattribute__(self, name: str) -> "Any":
            thread = get_ident()
            if thread not in busy:
                busy.add(thread)
                try:
                    frame = getframe(1)
                    path = None if is_installed(frame.f_code.co_filename) else repository_path(frame, True)
                    if path is not None:
                        once("import of ctypes", path)
                finally:
                    busy.discard(thread)
            return types.ModuleType.__getattribute__(self, name)

    def access(event: str, arguments: "tuple[Any, ...]", frame: "Any") -> "str | None":
        # What an event is called in the report; None for one of no interest.
        if event in FRAME_EVENTS:
            return event if lends(frame) else None
        if event in CODE_MADE:
            return None if is_installed(frame.f_code.co_filename) else event
        if event == "object.__getattr__":
            owner, name = arguments[0], arguments[1]
            code = owner if isinstance(owner, types.CodeType) else getattr(owner, "f_code", None)
            code = code or getattr(owner, "__code__", None)
            interesting = name in FRAMES or (name in CODE and belongs_to_tests(code))
            return str(name) if interesting and lends(frame) else None
        if event == "object.__setattr__":
            owner, name = arguments[0], arguments[1]
            if name in CODE:
                code = getattr(owner, "__code__", None)
                path = str(getattr(code, "co_filename", root))
                # namedtuple sets the defaults of a function that it makes of a text.
                made = path.startswith("<") and frame.f_code.co_filename.endswith("/collections/__init__.py")
                own = path.startswith(root) and not belongs_to_tests(code)
                return None if own or made else event
            if name not in ("__class__", "__bases__"):
                return None
            module = owner if isinstance(owner, types.ModuleType) else sys.modules.get(getattr(owner, "__module__", ""))
            path = getattr(module, "__file__", None) or root
            own = path.startswith(root) and not is_test(path[len(root) :])
            return event if not own and (path.startswith(root) or is_runner(path) or "unittest" in path) else None
        if event == "compile":
            # Under the name of another file code would act in its name.
            name = arguments[1]
            honest = name is None or fsdecode(name).startswith("<") or is_installed(frame.f_code.co_filename)
            return None if honest else "compile under the name of a file"
        if event in FILES:
            return opened(arguments)
        if event == "import":
            return "import of " + arguments[0].partition(".")[0] if wants(frame) else None
        return event if event in SEARCHES or event in SPAWNS or event.startswith("ctypes.") else None

    watched = SEARCHES | SPAWNS | FILES | FRAME_EVENTS | CODE_MADE | ATTRIBUTES | {"compile", "import"}

    def hook(event: str, arguments: "tuple[Any, ...]") -> None:
        if event not in watched and event[:7] != "ctypes.":
            return
        if event == "import" and arguments[0].partition(".")[0] not in MEMORY:
            return
        thread = get_ident()
        if thread in busy:
            return
        busy.add(thread)
        try:
            frame = getframe(1)
            if event == "ctypes.dlopen":
                # Importing it a second time raises no event, and most of what it does raises none at all.
                for name in ("ctypes", "_ctypes"):
                    if type(sys.modules.get(name)) is types.ModuleType:
                        sys.modules[name].__class__ = Noticed
            what = access(event, arguments, frame)
            path = None if what is None else repository_path(frame, event in FILES or event == "import")
            if what is not None and path is not None:
                once(what, path)
        except Exception:  # never into the code that is watched
            return
        finally:
            busy.discard(thread)

    if hasattr(sys, "addaudithook"):
        sys.addaudithook(hook)
    before = [(vars(owner), owner, name, value) for (owner, name), value in parts().items()]
    modules = {name: sys.modules[name] for name in RUNNERS | set(NAMESPACES) if name in sys.modules}
    names = [(owner, frozenset(vars(owner))) for owner in {one for _, one, _, _ in before if isinstance(one, type)}]
    sources: dict[str, Bindings] = {}

    def look(module: "Any") -> None:
        for namespace, owner, name, value in before:
            if namespace.get(name) is not value:
                once("replaced {}.{}".format(getattr(owner, "__qualname__", owner.__name__), name), "")
        for name, value in modules.items():
            if sys.modules.get(name) is not value:
                once("replaced the module " + name, "")
        for owner, known in names:
            for name in vars(owner).keys() - known:
                # pytest's own plugins add a few.
                if isinstance(vars(owner)[name], METHODS) and not is_runner(file_of(vars(owner)[name])):
                    once(f"added {owner.__qualname__}.{name}", "")
        path = str(getattr(module, "__file__", None) or "")
        if path.startswith(root) and path.endswith(".py"):
            try:
                if path not in sources:
                    sources[path] = Bindings(path)
                foreign = list(sources[path].foreign_names(module))
            except Exception as error:  # the source of a test that has just been run can be read
                foreign = [type(error).__name__]
            for name in foreign:
                once(f"placed {name} in {path[len(root) :]}", "")

    return look


def file_of(method: "Any") -> str:
    """Return the file of a method's code."""
    function = getattr(method, "fget", None) or getattr(method, "__func__", None) or method
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


def pytest_file() -> str:
    """Return the file of pytest."""
    return str(sys.modules["pytest"].__file__)


def parts() -> "dict[tuple[Any, str], Any]":
    """Return the functions and classes that tests run by, with the functions of those classes, by owner and name."""
    found: dict[tuple[Any, str], Any] = {}
    for module_name, names in OTHERS.items():
        module = sys.modules.get(module_name)
        found.update({(module, name): getattr(module, name) for name in names if hasattr(module, name)})
    for module_name in NAMESPACES:
        module = sys.modules.get(module_name)
        # unittest may not be loaded yet; unittest.case is then loaded by the test, after the code under test.
        public = [name for name in getattr(module, "__dict__", ()) if not name.startswith("_") or name == "__import__"]
        found.update({(module, name): vars(module)[name] for name in public})
    for module_name in RUNNERS & set(sys.modules):
        module = sys.modules[module_name]
        for name, value in list(vars(module).items()):
            if isinstance(value, (type, types.FunctionType)) and value.__module__ == module_name:
                found[module, name] = value
                if isinstance(value, type):
                    own = vars(value).items()
                    found.update({(value, part): method for part, method in own if isinstance(method, METHODS)})
    return found


class Bindings:
    """What the source of a test's module binds: `counts` by name, and single bindings by their statement."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.counts: dict[str, int] = {}
        self.statements: dict[str, tuple[Any, ...]] = {}
        self.stars = False
        with open(path, "rb") as file:
            self.tree = ast.parse(file.read())
        for node in own_nodes(self.tree.body):
            self.add(node)

    def add(self, node: "Any") -> None:
        """Count the names that a statement or expression binds."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.bind(node.name, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self.stars = self.stars or alias.name == "*"
                self.bind(alias.asname or alias.name.partition(".")[0], node, alias)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bind(node.id, node)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self.bind(node.name, node)

    def bind(self, name: str, *statement: "Any") -> None:
        """Note one binding."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self.statements[name] = statement

    def foreign_names(self, module: "Any") -> "Iterator[str]":
        """Yield the names of a module whose values do not come from its source, where that can be detected."""
        namespace = vars(module)
        if not self.stars:
            # A name that the source does not bind can only be one of a built-in function, and hide it.
            for name in namespace.keys() - self.counts.keys():
                if not name.startswith("_") and hasattr(builtins, name):
                    yield name
        for name, statement in self.statements.items():
            value = namespace.get(name, MISSING)
            if self.counts[name] == 1 and value is not MISSING and not self.is_own(value, *statement):
                yield name
            elif isinstance(value, type) and isinstance(statement[0], ast.ClassDef) and self.counts[name] == 1:
                for inner in self.foreign_methods(value, statement[0]):
                    yield name + "." + inner

    def is_own(self, value: "Any", node: "Any", alias: "Any" = None) -> bool:
        """Return whether a value can be the one that a single binding gives; imports of the repository always can."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
            return isinstance(value, types.FunctionType) and value.__code__.co_filename == self.path
        if isinstance(node, ast.Import) and (alias.asname is None or "." not in alias.name):
            return value is sys.modules.get(alias.name.partition(".")[0], value)
        if isinstance(node, ast.ImportFrom) and not node.level:
            source = sys.modules.get(str(node.module))
            if str(node.module) in NAMESPACES or str(node.module) in RUNNERS:
                return value is getattr(source, alias.name, value)
        return True

    def foreign_methods(self, value: type, node: "ast.ClassDef") -> "Iterator[str]":
        """Yield the methods of a class of the test that its source does not define, and that hide an inherited one."""
        bound = Bindings.__new__(Bindings)
        bound.counts, bound.statements, bound.stars = {}, {}, False
        for inner in own_nodes(node.body):
            bound.add(inner)
        if node.decorator_list:
            return
        for name, method in list(vars(value).items()):
            if not isinstance(method, METHODS) or (name.startswith("__") and name not in DECIDING):
                continue
            if name not in bound.counts and any(name in vars(base) for base in value.__mro__[1:]):
                yield name


def own_nodes(body: "list[Any]") -> "Iterator[Any]":
    """Yield the nodes of a body without those inside of functions, classes and comprehensions."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            waiting.extend(ast.iter_child_nodes(node))
