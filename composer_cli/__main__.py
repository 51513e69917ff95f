"""Entry point: `composer`, or `python -m composer_cli` where another program on this machine is called `composer`."""

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any


def main() -> None:
    """Run the command line."""
    # TRL tells Hugging Face of each training; whoever wants that sets the variable to 0.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from composer_cli.app import main as run_command_line
    from composer_stages.backends.resources import wait_passively

    wait_passively()
    if sys.argv[1:2] == ["compare"]:
        leave_pandas_out()
    run_command_line()


def leave_pandas_out() -> None:
    """Have Arrow ask for pandas now, and not find it: to import it takes longer than to compare two logs.

    Arrow asks once, for arrays that are of pandas, of which a comparison makes none; its `to_pandas` asks again.
    """
    import pyarrow as pa

    class Absent(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            if fullname == "pandas":
                raise ModuleNotFoundError(name=fullname)

    sys.meta_path.insert(0, absent := Absent())
    pa.array([None])
    sys.meta_path.remove(absent)


if __name__ == "__main__":
    main()
