"""What do the modes of a Harbor task protect from? Generated forgeries, in bubblewrap and in containers.

    python benchmarks/harbor_forgeries.py shared separate --runs-in podman --few
    python benchmarks/harbor_forgeries.py

The modes are four ways of writing one task of a wrong function (tests/support/harbor_forgeries.py); the forgeries are
those of benchmarks/forgeries.py, one of every mechanism, and six that work on the machine: rewards, programs, links and
tests of the agent's own. Prints one line a forgery and the table by family; `wrong` are those that are
rewarded without a flag, or have no reward.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import records
from support import harbor_containers
from support.forgery_table import Table
from support.harbor_forgeries import MODES, ON_MACHINE, every_family, every_mechanism, table

WORDS = "rewarded without a flag, or without any reward (null)"


def main() -> None:
    """Print and record a table for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(map(repr, MODES))}; all without any")
    parser.add_argument("--runs-in", choices=("bubblewrap", "podman"), default="bubblewrap")
    parser.add_argument("--few", action="store_true", help="one forgery of every family, not of every mechanism")
    chosen = parser.parse_args()
    if unknown := [mode for mode in chosen.modes if mode not in MODES]:
        parser.error(f"there is no mode {unknown[0]!r}; choose of {', '.join(map(repr, MODES))}")
    with tempfile.TemporaryDirectory() as folder, engine(chosen.runs_in, Path(folder)):
        for number, mode in enumerate(chosen.modes or MODES):
            found = table(
                mode, every_family() if chosen.few else every_mechanism(), Path(folder) / str(number), chosen.runs_in
            )
            print(f"{mode}\n{found}\n", flush=True)
            records.write(__file__, claims(f"{mode}, in {chosen.runs_in}", found))


@contextmanager
def engine(runs_in: str, folder: Path) -> Iterator[None]:
    """Let podman run containers where the tasks do; exit with the reason where it cannot."""
    if runs_in == "bubblewrap":
        yield
        return
    with harbor_containers.podman(folder) as missing:
        if missing:
            sys.exit(missing)
        yield


def claims(where: str, found: Table) -> list[records.Claim]:
    """Return the claims of a table: of the forgeries in code, and of those on the machine."""
    code = [row for family, row in found.rows.items() if family != ON_MACHINE]
    tried, wrong = (sum(row[column] for row in code) for column in ("tried", "wrong"))
    machine = found.rows[ON_MACHINE]
    return [
        records.measured(f"{where}: {tried} forgeries in the agent's code, of them {WORDS}", wrong, n=tried),
        records.measured(
            f"{where}: {machine['tried']} forgeries on the agent's machine, of them {WORDS}",
            machine["wrong"],
            n=machine["tried"],
        ),
    ]


if __name__ == "__main__":
    main()
