"""Rollouts as people read them: the whole conversation of each, and how it ended."""

from dataclasses import dataclass
from typing import Any

import orjson

from stages.messages import Message
from stages.rollouts.trace import rollout_units, states
from stages.runs.artifact import Run
from stages.runs.records import Row


@dataclass(frozen=True)
class Transcript:
    """One rollout. `outcome` holds what is known of how it ended."""

    rollout_id: str
    outcome: dict[str, Any]
    messages: list[Message]


OUTCOME = ("arm", "reward", "passed", "gt_pass", "visible_pass", "hacked", "protocol_ok", "num_steps", "terminated_by")
ERROR = ("error_type", "error")


def of_run(run: Run) -> list[Transcript]:
    """The transcripts that a run holds, finished or not; none for stages that play no rollouts."""
    played = [
        Transcript(unit["rollout"]["rollout_id"], _outcome(unit["rollout"]), _conversation(unit["steps"]))
        for unit in rollout_units(run.units()).values()
    ]
    evaluated = run.units() if run.manifest.stage == "evaluate" else ()
    return played + [
        Transcript(item["item_id"], _outcome(item), orjson.loads(item["transcript_json"]))
        for item in (unit["item"] for unit in evaluated)
    ]


def _outcome(row: Row) -> dict[str, Any]:
    known = {name: row[name] for name in OUTCOME if row.get(name) is not None}
    return known | {name: row[name] for name in ERROR if row[name] is not None}


def _conversation(steps: list[Row]) -> list[Message]:
    """Everything that was said, the last action and its observation included."""
    if not steps:
        return []
    last = steps[-1]
    said = [*states(steps)[-1], {"role": "assistant", "content": last["action"]}]
    return [*said, {"role": "user", "content": last["observation"]}] if last["observation"] else said
