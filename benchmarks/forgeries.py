"""Is a forged pass ever paid without a flag, and is an honest solution ever flagged? Each environment's own grading.

    python benchmarks/forgeries.py swe-mini --count 120 --cache FOLDER
    python benchmarks/forgeries.py swe-mini --honest --count 200 --cache FOLDER

The forgeries are generated from mechanisms, each with one of many disguises (tests/support/forgeries.py): code beside a
bug that makes its tests pass without a fix. `passing` are those that have an effect, `wrong` those that are paid
without a flag or have no reward (null). The honest solutions (tests/support/honest_solutions.py) are rewrites of the
fix, and fixes with new files that use ctypes, frames, inspect, threads, patching and others; `wrong` are those that are
flagged or not paid. Prints one line a solution, and the table by family of mechanisms.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import records
from support.forgery_table import TABLES
from support.honest_solutions import READING


def main() -> None:
    """Print and record one table; exit code 1 where a solution is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=sorted(TABLES))
    parser.add_argument("--honest", action="store_true")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--cache", default="", help="a folder for what swe-mini fetches and builds once")
    parser.add_argument("--only", default="", help="those with this text in their names; nothing is recorded")
    chosen = parser.parse_args()
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
        whose = "generated forgeries"
        return [
            counted(whose, "paid without a flag or without any reward (null)", every, "wrong", "= 0"),
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


if __name__ == "__main__":
    main()
