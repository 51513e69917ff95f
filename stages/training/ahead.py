"""Rollouts of coming steps, played by a server while this step trains: at most `depth` steps ahead of the weights."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stages.policy.base import Policy
from stages.rollouts.episode import Episode
from stages.runs.records import Row

Play = Callable[[list[Row], Policy, int], list[Episode]]


class Ahead:
    """Plays steps in order in a thread of its own; each with the newest weights at its beginning, whole.

    rows_of: the rows of a step, None behind the last. newest: the policy with the weights that the server has now.
    """

    def __init__(
        self, play: Play, rows_of: Callable[[int], list[Row] | None], newest: Callable[[], Policy], depth: int
    ) -> None:
        self._play, self._rows_of, self._newest, self._depth = play, rows_of, newest, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._playing: dict[int, tuple[list[str], Future[list[Episode]]]] = {}

    def take(self, rows: list[Row], step: int) -> list[Episode]:
        """The rollouts of a step, played already or now; those of the next steps are begun."""
        wanted = [row["task_id"] for row in rows]
        tasks, playing = self._playing.pop(step, ([], None))
        episodes = (
            playing.result() if playing is not None and tasks == wanted else self._play(rows, self._newest(), step)
        )
        for later in range(step + 1, step + self._depth + 1):
            coming = self._rows_of(later)
            if coming is not None and later not in self._playing:
                self._playing[later] = ([r["task_id"] for r in coming], self._pool.submit(self._later, coming, later))
        return episodes

    def _later(self, rows: list[Row], step: int) -> list[Episode]:
        return self._play(rows, self._newest(), step)

    def close(self) -> None:
        """Begin no further step; returns when the one that is being played has ended."""
        self._pool.shutdown(cancel_futures=True)
