"""The way in: `composer`, or `python -m composer_cli` where another program on this machine is called `composer`."""

import sys

from composer_cli import version


def main() -> None:
    """Make sure that both packages are Composer's own before anything of them is used, then run the command line."""
    if sentence := version.intruder():
        print(sentence, file=sys.stderr)
        sys.exit(2)
    from composer_cli.app import main as run

    run()


if __name__ == "__main__":
    main()
