"""The distinct states of a run, numbered in the order of rollouts and steps, on disk: a run may exceed memory."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from composer_stages.data_files import load_toml
from composer_stages.runs.kinds import STEP, Row
from composer_stages.runs.run import Run
from composer_stages.runs.tables import MEMORY, Scan, open_database, rows_of

SQL = load_toml(__package__, "distinct.toml")


@dataclass(frozen=True, slots=True)
class DistinctState:
    """A distinct state: the rollout and step that reached it first, and the number of steps taken in it."""

    digest: str
    task_id: str
    rollout_id: str
    step: int
    num_steps: int


class DistinctStates(AbstractContextManager["DistinctStates"]):
    """The distinct states of a run; `folder` holds what memory does not, `tables` are further tables of the database.

    `database` has the run's `steps`, `numbered` with the number `nth` of each, and the `states`.
    """

    def __init__(self, rollouts: Run, folder: Path, memory: str = MEMORY, **tables: Scan) -> None:
        self.database = open_database(folder, memory, steps=rollouts.scan(STEP), **tables)
        for table in SQL["tables"].values():
            self.database.execute(table)
        ((self._number,),) = self.database.execute("SELECT count(*) FROM states").fetchall()
        self._reading: list[Generator[Row, None, None]] = []

    def __exit__(self, *error: object) -> None:
        for rows in self._reading:
            rows.close()  # a reader left open by an error would keep the database locked for the next attempt
        self.database.close()

    def __len__(self) -> int:
        return int(self._number)

    def __iter__(self) -> Iterator[DistinctState]:
        return (DistinctState(**row) for row in self.rows(SQL["queries"]["first_steps"]))

    def rows(self, question: str) -> Iterator[Row]:
        """Yield the rows of a query."""
        self._reading.append(rows_of(self.database, question))
        return self._reading[-1]

    def rollout_ids(self) -> list[str]:
        """Return the sorted ids of all rollouts that have steps."""
        rows = self.database.execute("SELECT rollout_id FROM rollouts ORDER BY place").fetchall()
        return [name for (name,) in rows]

    def steps(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield each state's digest with the steps taken in it: rollout_id, step, action, truncated."""
        for digest, rows in groupby(self.rows(SQL["queries"]["steps_of_states"]), key=itemgetter("digest")):
            yield digest, list(rows)
