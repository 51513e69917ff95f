"""An interpreter with openenv: that which `COMPOSER_OPENENV` names, or this one."""

import os
import shutil
import sys
from importlib.util import find_spec

import pytest

PYTHON = os.environ.get("COMPOSER_OPENENV") or (
    sys.executable
    if find_spec("openenv") and find_spec("uvicorn") and "stand_ins" not in str(find_spec("openenv"))
    else ""
)

needs_openenv = pytest.mark.skipif(
    not shutil.which(PYTHON),
    reason="openenv is absent: nothing was played through its server. COMPOSER_OPENENV names a Python that has it",
)
