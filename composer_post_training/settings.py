"""Groups of settings as dictionaries whose keys type checkers know: `PolicySettings(model="m")` is `{"model": "m"}`.

Their keys, and the stages as functions, stand for type checkers and editors in `settings.pyi`.
"""

import re
from importlib import import_module
from typing import Any

from composer_stages.data_files import load_text

_NAMES = frozenset(re.findall(r"^class (\w+Settings)\(", load_text(__package__, "settings.pyi"), re.M))


def __getattr__(name: str) -> Any:
    """Return the type of a group of settings, or the function of a stage."""
    return dict if name in _NAMES else getattr(import_module("composer_post_training.interface"), name)
