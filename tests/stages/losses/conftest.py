"""Checks the shapes in every signature of the losses while these tests run: jaxtyping's import hook and beartype."""

import importlib
import sys

from jaxtyping import install_import_hook

from tests.stages.losses import checker

PACKAGE = "stages.losses"

# Another test module may have imported the losses before the hook existed: import them afresh, with it.
for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
    del sys.modules[name]
with install_import_hook(PACKAGE, f"{checker.__name__}.checked"):
    importlib.import_module(f"{PACKAGE}.parity")
