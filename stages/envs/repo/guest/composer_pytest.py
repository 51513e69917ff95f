"""Start pytest as `python -m pytest` does, without the collector of garbage while it is imported.

A short run is mostly that import, and the collector a fifth of it. composer_outcomes.py, the plugin that is loaded
before any conftest.py, starts the collector. Runs under Python 3.6 and later.
"""

import gc
import runpy

if __name__ == "__main__":
    gc.disable()
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
