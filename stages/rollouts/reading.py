"""Rollouts read back from the tables of a run, one after the other, so that a run may be larger than memory."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

import orjson

from stages.errors import BadInput
from stages.messages import Message
from stages.runs.artifact import Run
from stages.runs.records import ROLLOUT, STEP, Row


def rollout_rows(run: Run) -> Iterator[tuple[Row, list[Row]]]:
    """Each rollout with its steps in order, in the order of the table of rollouts.

    `BadInput` where the steps are not in the order of the rollouts, in which every stage writes them.
    """
    followed = step_groups(run.scan(STEP).rows())
    steps = next(followed, [])
    for rollout in run.scan(ROLLOUT).rows():
        if steps and steps[0]["rollout_id"] == rollout["rollout_id"]:
            yield rollout, steps
            steps = next(followed, [])
        else:
            yield rollout, []
    if steps:
        raise BadInput(
            f"{run.path}: the steps of {steps[0]['rollout_id']} do not lie in the order of the rollouts. "
            "Rerun the stage that wrote them."
        )


def conversation(steps: Iterable[Row]) -> list[Message]:
    """All that was said in one rollout, its last action included; `steps` are all of it, in order."""
    said: list[Message] = []
    action = ""
    for row in steps:
        said += orjson.loads(row["new_messages_json"])
        action = row["action"]
    return [*said, {"role": "assistant", "content": action}]


def step_groups(steps: Iterable[Row]) -> Iterator[list[Row]]:
    """The steps of one rollout after the other, where those of each lie together; each in order."""
    return (sorted(group, key=itemgetter("step")) for _, group in groupby(steps, key=itemgetter("rollout_id")))
