"""Names of a module that are imported when they are first used, for what defines them takes long or is not installed.

if TYPE_CHECKING:
    from composer_stages.training.channels.base import Channel
else:
    __getattr__ = deferred(__name__, {"composer_stages.training.channels.base": ("Channel",)})
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def deferred(module: str, origins: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports each name from its origin.

    origins: the names by the module that defines them.
    """
    origin_of = {name: origin for origin, names in origins.items() for name in names}

    def get(name: str) -> Any:
        if name not in origin_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(origin_of[name]), name)

    return get
