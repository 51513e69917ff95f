"""OpenHands `output.jsonl`: one rollout a line.

Its history holds events of version 0 or 1, pairs of events (2024), or flat events (resolver).

Format read from All-Hands-AI/OpenHands `evaluation/utils/shared.py` and `openhands/events/serialization`, and from
OpenHands/software-agent-sdk `openhands/sdk/event` at their states of 2025-11 and 2026-08.
"""

from collections.abc import Iterator
from typing import Any

from stages.importers import openhands_events
from stages.importers.base import INSTANCE, ImportedTurn, Origin, Record, Trajectory, family_of
from stages.importers.sidecars import stem
from stages.rollouts import missing
from stages.runs import store

NAME = "openhands"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS, missing.OPENING})
OF_A_RUN = {"test_result", "git_patch", "instruction", "instance_id", "metadata", "metrics"}


def recognises(record: Any) -> bool:
    """A history of events (or pairs of them) and something that belongs to a run of an evaluation."""
    history = record.get("history") if isinstance(record, dict) else None
    if not isinstance(history, list) or not OF_A_RUN & record.keys():
        return (
            history is None
            and isinstance(record, dict)
            and {"instance_id", "test_result", "instruction"} <= record.keys()
        )
    return all(
        isinstance(event, list | dict) and not (isinstance(event, dict) and "role" in event) for event in history
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout. A record without history is an instance that failed before the agent began."""
    instance, result = _instance(record), record.get("test_result") or {}
    about, metrics = record.get("metadata") or {}, record.get("metrics") or {}
    opening, turns = openhands_events.conversation(record.get("history") or [], record.get("instruction"))
    reward, resolved = _judged(record, result, origin, instance)
    usage = metrics.get("accumulated_token_usage") or {}
    named = bool(INSTANCE.fullmatch(instance or ""))
    yield Trajectory(
        task_id=instance or f"{NAME}/{store.digest(record.get('instruction'))[:12]}",
        env="swe-bench" if named else _env(about, origin),
        opening=opening,
        turns=turns,
        missing=set(MISSING) | _unsaid(turns, reward),
        model=(about.get("llm_config") or about.get("llm") or {}).get("model") or about.get("model_name"),
        statement=_statement(record),
        family=family_of(instance) if named and instance else None,
        reward=reward,
        resolved=resolved,
        submission=result.get("git_patch", record.get("git_patch")),
        terminated_by=turns[-1].finish_reason if turns and turns[-1].finish_reason == "length" else None,
        error=_error(record, turns),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cost_usd=metrics.get("accumulated_cost"),
        extra={
            "agent": about.get("agent_class") or NAME,
            "test_result": {k: v for k, v in result.items() if k != "git_patch"},
        }
        | {name: record[name] for name in ("success", "result_explanation", "final_message") if name in record},
    )


def _instance(record: Record) -> str | None:
    inside, issue = _inside(record), record.get("issue") or {}
    named = f"{issue['owner']}/{issue['repo']}#{issue['number']}" if issue else None
    name = next(
        (v for v in (record.get("instance_id"), record.get("id"), inside.get("instance_id"), named) if v is not None),
        None,
    )
    return None if name is None else str(name)


def _inside(record: Record) -> Record:
    """The instance's row of the dataset, where the record holds it."""
    instance = record.get("instance")
    return instance if isinstance(instance, dict) else {}


def _env(about: Record, origin: Origin) -> str:
    return str(about.get("dataset") or (stem(origin.path) if stem(origin.path) != "output" else NAME))


def _statement(record: Record) -> str | None:
    return _inside(record).get("problem_statement") or (record.get("issue") or {}).get("body") or None


def _judged(record: Record, result: Record, origin: Origin, instance: str | None) -> tuple[float | None, bool | None]:
    """Reward and verdict from the tests, in the record or a report beside it; the resolver's own opinion is none."""
    report = record.get("report") or result.get("report") or {}
    resolved = report.get("resolved") if isinstance(report, dict) else None
    if resolved is None and (verdict := origin.sidecars.verdict(origin.path, instance)):
        resolved = verdict.resolved
    if resolved is None and isinstance(result.get("result"), bool):
        return float(result["result"]), None
    return (None, None) if resolved is None else (float(resolved), bool(resolved))


def _unsaid(turns: list[ImportedTurn], reward: float | None) -> set[missing.Fact]:
    unjudged = {missing.REWARD} if reward is None else set()
    return unjudged | (set() if any(turn.finish_reason for turn in turns) else {missing.FINISH})


def _error(record: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    if record.get("error"):
        return "error", str(record["error"])
    return None if turns else ("no_actions", "the record holds no action of the agent")
