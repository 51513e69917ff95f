"""Exported tracing spans of an agent: model calls and tool calls in the order of time, one session a file.

Tool results carry no call id; they follow the model call that asked for them. Calls of a judge model are not part of
the rollout.

Format read from piyushhhxyz/vorflux-swe-benchmarks at 9e2acad91, `evaluation/verified/*/trajs`.
"""

import json
from collections.abc import Iterator
from typing import Any

from stages.formats.base import ImportedTurn, Origin, Reader, Record, Trajectory, family_of
from stages.formats.messages import message, spoken, text
from stages.messages import write
from stages.rollouts import missing

NAME = "spans"
MISSING = frozenset({missing.OPENING, missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})


def recognises(record: Any) -> bool:
    """Whether a record is a session whose trajectory is a list of typed spans."""
    spans = record.get("trajectory") if isinstance(record, dict) else None
    return (
        isinstance(spans, list)
        and (bool(spans) or "session_id" in record)
        and all(isinstance(s, dict) and "type" in s and "timestamp" in s for s in spans)
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield the one rollout of a session."""
    instance = str(record["instance_id"])
    verdict = origin.sidecars.verdict(origin.path, instance)
    resolved = verdict.resolved if verdict else None
    first: Record = next(
        (span for span in record["trajectory"] if span["type"] == "llm_call" and span.get("task_prompt")), {}
    )
    turns = _turns(record["trajectory"])
    yield Trajectory(
        task_id=instance,
        env="swe-bench",
        opening=[message(item) for item in first.get("task_prompt") or []],
        turns=turns,
        missing=set(MISSING) | ({missing.REWARD} if resolved is None else set()),
        own_id=record.get("session_id"),
        model=verdict.model if verdict else None,
        family=family_of(instance),
        reward=None if resolved is None else float(resolved),
        resolved=resolved,
        error=None if turns else ("no_actions", "the session holds no call of the model"),
        extra={"agent": (verdict.agent if verdict else None) or NAME, "spans": record.get("total_spans")},
    )


def _turns(spans: list[Record]) -> list[ImportedTurn]:
    turns: list[ImportedTurn] = []
    for span in spans:
        if span["type"] == "llm_call" and span.get("output"):
            output = span["output"] if isinstance(span["output"], dict) else {"content": text(span["output"])}
            turns.append(ImportedTurn(write(spoken({"role": "assistant", **output}))))
        elif span["type"] == "tool_call" and turns:
            result = span.get("result")
            shown = result if isinstance(result, str) else json.dumps(result)
            turns[-1].observed.append({"role": "tool", "content": shown})
            if isinstance(result, dict) and isinstance(result.get("exitCode"), int):
                turns[-1].returncode = result["exitCode"]
    return turns


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
