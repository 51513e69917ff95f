"""Start pytest as `python -m pytest` does, once it and the reporting plugin are imported without the work folder.

    python composer_pytest.py -p composer_outcomes ARGUMENTS...

No module of the work folder can shadow one that pytest or the plugin needs: its folders of PYTHONPATH, which
composer_supervisor.py passes in the variable COMPOSER_PATH, are searched afterwards. They are then searched first,
so that tests find a module of the work folder with the name of a standard one. Garbage collection is off until the
plugin is imported, since it takes a fifth of the import of pytest, which dominates a short run. Runs under Python 3.6
and later.
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from runpy import run_module


def start() -> None:
    """Import pytest and the plugin, then search the work folder as well, and run pytest."""
    value, work = os.environ.pop("COMPOSER_PATH", None), os.getcwd()
    paths = [path for path in (value or "").split(os.pathsep) if path]
    work_paths = [path for path in paths if (os.path.abspath(path) + os.sep).startswith(work + os.sep)]
    # Of a script Python searches the folder first, with -P (from Python 3.11 on) not.
    safe = getattr(sys.flags, "safe_path", False)
    standard = sys.path[0 if safe else 1 :]
    sys.path[:] = [path for path in paths if path not in work_paths] + standard
    gc.disable()
    config = import_module("_pytest.config")
    for name in getattr(config, "default_plugins", ()):
        with suppress(ImportError):  # pytest reports it
            import_module(f"_pytest.{name}")
    import_module("composer_outcomes")
    sys.path[:] = ([] if safe else [work]) + paths + standard
    if value is not None:
        os.environ["PYTHONPATH"] = value  # of what tests start
    forget_standard([*([] if safe else [work]), *work_paths])
    run_module("pytest", run_name="__main__", alter_sys=True)


def forget_standard(folders: "list[str]") -> None:
    """Let the next import of a standard module find that of the work folder, where these folders have one."""
    # Before Python 3.10 the names are unknown, and imported modules stay, as with the program pytest.
    names = {name.partition(".")[0] for name in sys.modules} & set(getattr(sys, "stdlib_module_names", ()))
    for name in names.difference(sys.builtin_module_names):
        spec = PathFinder.find_spec(name, folders)
        # A folder without __init__.py shadows no module.
        if spec is not None and spec.loader is not None and not is_frozen(name):
            for loaded in [module for module in sys.modules if module.partition(".")[0] == name]:
                del sys.modules[loaded]


def is_frozen(name: str) -> bool:
    """Return whether a module is part of the interpreter, which no folder replaces."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.origin == "frozen"


if __name__ == "__main__":
    start()
