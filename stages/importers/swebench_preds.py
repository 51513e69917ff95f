"""SWE-bench predictions: one patch a line, or an object of them by instance, judged by the report beside the file.

A prediction is a rollout without steps: what was handed in, and the verdict on it.
"""

from collections.abc import Iterator
from typing import Any

from stages.importers.base import Origin, Record, Trajectory, family_of
from stages.rollouts import missing

NAME = "swebench-preds"
MISSING = frozenset({missing.STEPS, missing.OPENING, missing.FINISH, missing.PARSE, missing.ELISION})


def recognises(record: Any) -> bool:
    """A patch with its instance, or an object of nothing but such."""
    if not isinstance(record, dict) or not record:
        return False
    if "model_patch" in record and "instance_id" in record:
        return "responses_create_params" not in record
    return all(isinstance(value, dict) and "model_patch" in value for value in record.values())


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout a prediction."""
    if "model_patch" not in record:
        for instance, prediction in record.items():
            yield from trajectories({"instance_id": instance, **prediction}, origin)
        return
    instance = str(record["instance_id"])
    verdict = origin.sidecars.verdict(origin.path, instance, record.get("model_name_or_path"))
    resolved = verdict.resolved if verdict else None
    statement = origin.sidecars.statements.get(instance)
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        opening=[],
        turns=[],
        missing=set(MISSING) | ({missing.REWARD} if resolved is None else set()),
        model=record.get("model_name_or_path"),
        statement=statement,
        family=family_of(instance),
        reward=None if resolved is None else float(resolved),
        resolved=resolved,
        submission=record["model_patch"] or None,
        error=None,
    )
