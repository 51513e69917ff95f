"""What a stage would do and at most what it would cost, and working through its units in fixed batches.

Fixed, so that a resumed run gives the rows of an uninterrupted one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from stages.runs.artifact import RunWriter

BATCH = 32
Unit = TypeVar("Unit")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True)
class Plan:
    """Units of work with upper bounds: tokens as if every answer took its full length, prompts not counted."""

    units: int
    what: str
    max_completion_tokens: int = 0
    max_cost_usd: float = 0.0
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


class Units(Protocol[Made]):
    """Units that can be gone through again and again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Made]: ...


class Batched(Protocol):
    """What decides how units are batched: whether a policy captures tokens, and how many turns one call should hold."""

    capture_level: str
    batch_size: int


def blocks(keys: Sequence[str], size: int) -> list[Sequence[str]]:
    """The names of units, so many together as one worker does at least."""
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def work_through(
    units: "Units[Unit]",
    key: Callable[[Unit], str],
    do: Callable[[list[Unit]], Iterable[tuple[str, Mapping[str, Any], bool]]],
    *,
    policy: Batched,
    out: RunWriter,
    what: str,
) -> None:
    """Do every unit that is not finished and write (key, payload, failed) of each.

    A local model's arithmetic depends on the size of a batch, so a batch that is only partly there is done whole again
    and only what is missing is written; for a server, whose answers cost money, only what is missing is done. Where the
    run has workers, they do it, a batch or more each. Units may be made as they are gone through, which is done twice.
    """
    local = policy.capture_level == "tokens"
    size = BATCH if local else policy.batch_size
    out.spread(blocks([key(unit) for unit in units], size), what)
    waiting = iter(units)
    for start in range(0, len(units), size):
        batch = list(islice(waiting, size))
        missing = [unit for unit in batch if not out.finished(key(unit))]
        out.progress(what, start, len(units))
        if missing:
            out.raise_if_stopped()
            done = list(do(batch if local else missing))
            out.write_all([unit for unit in done if not out.finished(unit[0])])
    out.progress(what, len(units), len(units))
