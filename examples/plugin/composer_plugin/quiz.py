"""quiz: JSON lines with a question, an answer and whether it was right."""

from collections.abc import Iterator
from typing import Any

from composer_post_training.formats import ImportedTurn, Origin, Reader, Trajectory


def recognises(record: Any) -> bool:
    """Return whether a record is an answered question."""
    return isinstance(record, dict) and {"question", "answer", "right"} <= record.keys()


def trajectories(record: Any, origin: Origin) -> Iterator[Trajectory]:
    """Yield the answer as a trajectory of one turn."""
    yield Trajectory(
        opening=[{"role": "user", "content": record["question"]}],
        turns=[ImportedTurn(record["answer"])],
        task_id=record["question"],
        reward=float(record["right"]),
    )


READERS = (Reader("quiz", recognises, trajectories),)
