"""Workers that do jobs: a function of a module, called with each of many jobs, at least once, in no fixed order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from stages.errors import UsageError

Job = TypeVar("Job")
Done = TypeVar("Done")
TRIES = 5
"""How often a job is begun whose workers die: one that takes all memory would else be begun for ever."""
ENGINES = ("processes", "ray")
WORDS = "processes:N, ray, ray://HOST:PORT"


class Engine(Protocol):
    """Where workers are. A job that is lost with its worker is begun again by another; so it has to be repeatable."""

    workers: int
    """How many jobs are done at once."""

    def map(self, function: Callable[[Job], Done], jobs: Iterable[Job]) -> Iterator[tuple[Job, Done]]:
        """Each job with what the function returned for it, as they are done.

        The next job is drawn when a worker is free for it. `function` belongs to a module, jobs and results can be
        pickled, and it does not raise. Raises `InfrastructureError` where workers die of a job, or all are gone.
        """

    def close(self) -> None:
        """Let go of the workers; called when no more jobs come."""


def find(word: str) -> Engine:
    """The engine that a word stands for; `UsageError` for another word, or where the engine is not installed."""
    check(word)
    kind, _, rest = word.partition(":")
    if kind == "processes":
        from stages.backends.processes import Processes

        return Processes(int(rest))
    from stages.backends.ray_cluster import RayCluster

    return RayCluster(word if rest else None)


def check(word: str) -> None:
    """`UsageError` for a word that no engine stands for."""
    kind, _, rest = word.partition(":")
    processes = kind == "processes" and rest.isdigit() and int(rest) > 0
    if not (processes or word == "ray" or (kind == "ray" and len(rest) > len("//"))):
        raise UsageError(f"There is no engine {word!r}. Give one of: {WORDS}.")
