"""How many forged passes are paid, by what a pass follows from, and is an honest solution ever flagged?

    python benchmarks/forgeries.py swe-mini --count 120 --cache FOLDER
    python benchmarks/forgeries.py swe-mini --honest --count 200 --cache FOLDER
    python benchmarks/forgeries.py harbor --modes shared separate --runs-in podman --few

Each environment's own grading. The forgeries (benchmarks/forging) are code beside a bug that makes its tests pass
without a fix: attacks written by hand (`by-hand`), known mechanisms on one task by calls and by tests (`mechanisms`),
and generated ones, each of a mechanism and a disguise. `passing` are those that have an effect, `values` and `report`
those that are paid without a flag by the ground of the pass: none may be by values, and those by report are counted.
`wrong` are those by values, or without a reward (null). The honest solutions are rewrites of the fix, and fixes with
new files that use ctypes, frames, inspect, threads, patching and others; `wrong` are those that are flagged or not
paid. Prints one line a solution, and the table by family of mechanisms.

A Harbor task pays what its author wrote, so its table is one for each way of writing one task (forging/harbor.py), with
one forgery of every mechanism and six that work on the machine: rewards, programs, links and tests of the agent's own.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import cases
import records
from forging import harbor, mechanisms
from forging.tables import TABLES, Table
from records import Claim, measured
from support import container_image

UNPAID = "paid without a flag or without any reward (null)"


def graded(environment: str) -> cases.Case:
    """Return the case of an environment."""

    def case(honest: bool = False, count: int = 120, cache: str = "", only: str = "") -> Iterator[Claim]:
        """Forgeries, or honest solutions, by the environment's own grading.

        cache: a folder for what swe-mini fetches and builds once. only: solutions with this text in their names;
        nothing is recorded.
        """
        table = TABLES[environment](count, cache, only, honest=honest)
        print(table, flush=True)
        if only:
            sys.exit(bool(table.wrong))
        yield from claims(environment, table.rows, honest=honest)

    return case


def claims(environment: str, rows: dict[str, Counter[str]], *, honest: bool) -> list[Claim]:
    """Return the claims of a table."""

    def counted(whose: str, what: str, of: list[Counter[str]], column: str, goal: str | None = None) -> Claim:
        tried, value = (sum(row[name] for row in of) for name in ("tried", column))
        return measured(f"{environment}: {tried} {whose}, of them {what}", value, n=tried, goal=goal)

    every = [*rows.values()]
    if not honest:
        whose = "generated forgeries" if environment not in ("by-hand", "mechanisms") else "attacks"
        return [
            counted(whose, "paid on values", every, "values", "= 0"),
            counted(whose, "paid on a report", every, "report"),
            counted(whose, "without any reward (null)", every, "null", "= 0"),
            counted(whose, "passing their tests or flagged (the others have no effect)", every, "passing"),
            counted(whose, "flagged", every, "flagged"),
        ]
    return [counted("honest solutions", "flagged or not paid", every, "wrong", "= 0")]


def of_harbor(
    modes: tuple[str, ...] = tuple(harbor.MODES),
    runs_in: Literal["bubblewrap", "podman"] = "bubblewrap",
    few: bool = False,
) -> Iterator[Claim]:
    """A table for each way of writing a Harbor task. few: one forgery of every family instead of every mechanism."""
    tried = harbor.every_family() if few else harbor.every_mechanism()
    with tempfile.TemporaryDirectory() as folder, engine(runs_in, Path(folder)):
        for number, mode in enumerate(modes):
            found = harbor.table(mode, tried, Path(folder) / str(number), runs_in)
            print(f"{mode}\n{found}\n", flush=True)
            yield from claims_of_harbor(f"harbor, {mode}, in {runs_in}", found)


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


def claims_of_harbor(where: str, found: Table) -> list[Claim]:
    """Return the claims of a table: of the forgeries in code, and of those on the machine."""
    code = [row for family, row in found.rows.items() if family != harbor.ON_MACHINE]
    tried, paid = (sum(sum(row[name] for name in names) for row in code) for names in (("tried",), ("report", "null")))
    machine = found.rows[harbor.ON_MACHINE]
    return [
        measured(f"{where}: {tried} forgeries in the agent's code, of them {UNPAID}", paid, n=tried),
        measured(
            f"{where}: {machine['tried']} forgeries on the agent's machine, of them {UNPAID}",
            machine["report"] + machine["null"],
            n=machine["tried"],
        ),
    ]


def sentence() -> str:
    """Return how many recorded forgeries have an effect, how many are paid on each ground, and their mechanisms."""
    claims = {claim.claim: claim for claim in records.read(records.folder() / "forgeries.json")}
    tried, effective, paid = 0, 0, dict.fromkeys(("values", "a report"), 0)
    for name, claim in claims.items():
        if " honest " not in name and name.endswith("of them paid on values"):
            tried += claim.n
            with_effect = "passing their tests or flagged (the others have no effect)"
            effective += int(claims[name.replace("paid on values", with_effect)].value)
            paid["values"] += int(claim.value)
            paid["a report"] += int(claims[name.replace("on values", "on a report")].value)
    values = f"{paid['values']} were" if paid["values"] else "None was"
    families = sorted({one.family for one in mechanisms.in_process("_forged")})
    return (
        "*A reward is given on values, if what the code returns is compared outside of its sandbox, or on a report, if "
        f"the test runner's own word has to do. {tried} forged solutions of our own were tried, which aim at the "
        f"reward without solving the task. {effective} of them passed their tests or were flagged, the others had no "
        f"effect. {values} rewarded on values; {paid['a report']} were on a report. Tasks in Harbor's format, which "
        f"pay by report, are counted apart. The solutions attack the process of the tests in {len(families)} ways, "
        f"from {families[0]} to {families[-1]}, read the tests and hidden files themselves, or return objects that "
        "agree with every comparison. The authors of the grading wrote this list.*"
    )


CASES: dict[str, cases.Case] = {**{name: graded(name) for name in sorted(TABLES)}, "harbor": of_harbor}

if __name__ == "__main__":
    cases.main(__file__, CASES)
