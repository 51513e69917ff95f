"""Is a forged pass ever paid without a flag, and is an honest solution ever flagged? Each environment's own grading.

    python benchmarks/forgeries.py swe-mini --count 120 --cache FOLDER
    python benchmarks/forgeries.py swe-mini --honest --count 200 --cache FOLDER
    python benchmarks/forgeries.py harbor shared separate --runs-in podman --few

The forgeries (benchmarks/forging) are code beside a bug that makes its tests pass without a fix: attacks written by
hand (`by-hand`), and generated ones, each of a mechanism and a disguise. `passing` are those that have an effect,
`wrong` those that are paid without a flag or have no reward (null). The honest solutions are rewrites of the fix, and
fixes with new files that use ctypes, frames, inspect, threads, patching and others; `wrong` are those that are flagged
or not paid. Prints one line a solution, and the table by family of mechanisms.

A Harbor task pays what its author wrote, so its table is one for each way of writing one task (forging/harbor.py), with
one forgery of every mechanism and six that work on the machine: rewards, programs, links and tests of the agent's own.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import records
from forging import harbor
from forging.honest import READING
from forging.tables import TABLES, Table
from support import container_image

UNPAID = "paid without a flag or without any reward (null)"


def main() -> None:
    """Print and record the tables; exit code 1 where a solution is wrong, except for Harbor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=[*sorted(TABLES), "harbor"])
    parser.add_argument("modes", nargs="*", help=f"harbor: of {', '.join(map(repr, harbor.MODES))}; all without any")
    parser.add_argument("--honest", action="store_true")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--cache", default="", help="a folder for what swe-mini fetches and builds once")
    parser.add_argument("--only", default="", help="those with this text in their names; nothing is recorded")
    parser.add_argument("--runs-in", choices=("bubblewrap", "podman"), default="bubblewrap", help="harbor alone")
    parser.add_argument("--few", action="store_true", help="harbor: one forgery of every family")
    chosen = parser.parse_args()
    if chosen.environment == "harbor":
        if unknown := [mode for mode in chosen.modes if mode not in harbor.MODES]:
            parser.error(f"there is no mode {unknown[0]!r}; choose of {', '.join(map(repr, harbor.MODES))}")
        of_harbor(chosen.modes or list(harbor.MODES), chosen.runs_in, few=chosen.few)
        return
    table = TABLES[chosen.environment](chosen.count, chosen.cache, chosen.only, honest=chosen.honest)
    print(table)
    if not chosen.only:
        records.write(__file__, claims(chosen.environment, table.rows, honest=chosen.honest))
    sys.exit(bool(table.wrong))


def claims(environment: str, rows: dict[str, Counter[str]], *, honest: bool) -> list[records.Claim]:
    """Return the claims of a table."""

    def counted(whose: str, what: str, of: list[Counter[str]], column: str, goal: str | None = None) -> records.Claim:
        tried, value = (sum(row[name] for row in of) for name in ("tried", column))
        return records.measured(f"{environment}: {tried} {whose}, of them {what}", value, n=tried, goal=goal)

    every = [*rows.values()]
    if not honest:
        whose = "attacks" if environment == "by-hand" else "generated forgeries"
        return [
            counted(whose, UNPAID, every, "wrong", "= 0"),
            counted(whose, "passing their tests or flagged (the others have no effect)", every, "passing"),
            counted(whose, "flagged", every, "flagged"),
        ]
    reading = [row for family, row in rows.items() if family in READING]
    others = [row for family, row in rows.items() if family not in READING]
    found = [counted("honest solutions", "flagged or not paid", others, "wrong", "= 0")]
    if reading:
        whose = "honest solutions with a file that uses ctypes or reads a frame"
        found.append(counted(whose, "flagged or not paid", reading, "wrong", "= 0"))
    return found


def of_harbor(modes: list[str], runs_in: str, *, few: bool) -> None:
    """Print and record a table for each mode."""
    tried = harbor.every_family() if few else harbor.every_mechanism()
    with tempfile.TemporaryDirectory() as folder, engine(runs_in, Path(folder)):
        for number, mode in enumerate(modes):
            found = harbor.table(mode, tried, Path(folder) / str(number), runs_in)
            print(f"{mode}\n{found}\n", flush=True)
            records.write(__file__, claims_of_harbor(f"harbor, {mode}, in {runs_in}", found))


@contextmanager
def engine(runs_in: str, folder: Path) -> Iterator[None]:
    """Let podman run containers where the tasks do; exit with the reason where it cannot."""
    if runs_in == "bubblewrap":
        yield
        return
    with container_image.podman_for_harbor(folder) as missing:
        if missing:
            sys.exit(missing)
        yield


def claims_of_harbor(where: str, found: Table) -> list[records.Claim]:
    """Return the claims of a table: of the forgeries in code, and of those on the machine."""
    code = [row for family, row in found.rows.items() if family != harbor.ON_MACHINE]
    tried, wrong = (sum(row[column] for row in code) for column in ("tried", "wrong"))
    machine = found.rows[harbor.ON_MACHINE]
    return [
        records.measured(f"{where}: {tried} forgeries in the agent's code, of them {UNPAID}", wrong, n=tried),
        records.measured(
            f"{where}: {machine['tried']} forgeries on the agent's machine, of them {UNPAID}",
            machine["wrong"],
            n=machine["tried"],
        ),
    ]


if __name__ == "__main__":
    main()
