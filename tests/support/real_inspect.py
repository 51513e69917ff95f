"""An interpreter with inspect_ai: that which `COMPOSER_INSPECT` names, or this one."""

import os
import shutil
import sys
from importlib.util import find_spec

import pytest

PYTHON = os.environ.get("COMPOSER_INSPECT") or (sys.executable if find_spec("inspect_ai") else "")

needs_inspect = pytest.mark.skipif(
    not shutil.which(PYTHON),
    reason="inspect_ai is absent: its own reader did NOT read the export. COMPOSER_INSPECT names a Python that has it",
)
