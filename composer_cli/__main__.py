"""Entry point: `composer`, or `python -m composer_cli` where another program on this machine is called `composer`."""

import gc
import os
import sys


def main() -> None:
    """Run the command line."""
    # Imports make millions of objects that all stay; at the default of 700 collections take a tenth of the start.
    gc.set_threshold(20_000, 10, 10)
    # TRL tells Hugging Face of each training; whoever wants that sets the variable to 0.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from composer_cli.app import main as run_command_line
    from composer_stages.backends.resources import wait_passively

    wait_passively()
    if sys.argv[1:2] in (["compare"], ["extract-pairs"]):
        from composer_stages.runs.tables import leave_pandas_out

        leave_pandas_out()
    run_command_line()


if __name__ == "__main__":
    main()
