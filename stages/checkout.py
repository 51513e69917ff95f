"""Give a checkout's folder the modules of the package by its own name too: `stages.envs` is `composer_stages.envs`.

Where a checkout is on Python's path, `import stages` would find the folder and load every module a second time, with
classes that those of the package do not know.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FOLDER, PACKAGE = "stages", "composer_stages"


class PackageModules(MetaPathFinder, Loader):
    """Finder and loader of modules below the folder's name, which are those of the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module is loaded; None for those of other packages."""
        del path, target
        return ModuleSpec(fullname, self) if fullname.startswith(f"{FOLDER}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the package's module."""
        module = importlib.import_module(PACKAGE + spec.name.removeprefix(FOLDER))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, with the spec that was replaced on the way here."""
        if module.__spec__ and module.__spec__.loader_state:
            module.__spec__ = module.__spec__.loader_state


def alias() -> None:
    """Make the folder's name one of the package."""
    sys.meta_path.insert(0, PackageModules())
    sys.modules[FOLDER] = importlib.import_module(PACKAGE)
