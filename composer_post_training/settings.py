"""Groups of settings as dictionaries whose keys type checkers know: `PolicySettings(model="m")` is `{"model": "m"}`.

Their keys, and the stages as functions, stand for type checkers and editors in `settings.pyi`.
"""

import re

from composer_stages.data_files import load_text

_NAMES = frozenset(re.findall(r"^class (\w+Settings)\(", load_text(__package__, "settings.pyi"), re.M))


def __getattr__(name: str) -> type[dict[str, object]]:
    """Return the type of a group of settings."""
    if name in _NAMES:
        return dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
