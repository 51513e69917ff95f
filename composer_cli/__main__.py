"""Entry point: `composer`, or `python -m composer_cli` where another program on this machine is called `composer`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command line, or exit with code 2 where `stages` is another project's package."""
    root = Path(__file__).resolve().parents[1]
    # `stages` is a generic name: there is a package of that name on PyPI, which would hide ours.
    spec = find_spec("stages")
    places = [Path(path).resolve() for path in (spec.submodule_search_locations or [])] if spec else []
    if root / "stages" not in places[:1]:
        where = f"finds it in {places[0]}" if places else "finds none"
        print(
            f"Composer needs its own package `stages`, which lies in {root}, but Python {where}. "
            "Uninstall the other package, or use Composer from a virtual environment of its own (`./dev` makes one).",
            file=sys.stderr,
        )
        sys.exit(2)
    # TRL tells Hugging Face of each training; whoever wants that sets the variable to 0.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Both import `stages`, so only after the check.
    from composer_cli.app import main as run_command_line
    from stages.backends.resources import wait_passively

    wait_passively()
    run_command_line()


if __name__ == "__main__":
    main()
