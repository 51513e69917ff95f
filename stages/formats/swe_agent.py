"""SWE-agent `.traj`: one instance a file, with the message history, the steps, and all attempts of a retrying agent.

Format read from SWE-agent/SWE-agent at its state of 2026-07-16, `sweagent/types.py` and `sweagent/agent/agents.py`.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from composer_stages import json_text
from composer_stages.formats.base import ImportedTurn, Origin, Reader, Record, Trajectory, find_instance
from composer_stages.formats.messages import conversation, split_turns
from composer_stages.formats.reports import stem
from composer_stages.messages import Message
from composer_stages.rollouts import missing
from composer_stages.runs import store

NAME = "swe-agent"
ISSUE = re.compile(r"^ISSUE:\n(.*?)\n+^INSTRUCTIONS:", re.DOTALL | re.MULTILINE)


def recognises(record: Any) -> bool:
    """Whether a record has a history, steps of action and observation (none in a failed run), or attempts with them."""
    if not isinstance(record, dict):
        return False
    if isinstance(record.get("attempts"), list):
        return all(map(recognises, record["attempts"]))
    history, steps = record.get("history"), record.get("trajectory")
    if isinstance(history, list) and history:
        return all(isinstance(item, dict) and "role" in item for item in history)
    if steps == [] and isinstance(record.get("info"), dict):
        return True
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        return False
    return all(isinstance(step.get("action"), str) and isinstance(step.get("observation"), str) for step in steps)


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """Yield one rollout an attempt; a verdict on the file applies to the attempt that was chosen."""
    attempts = record.get("attempts") or [record]
    chosen = (record.get("info") or {}).get("best_attempt_idx", 0)
    for index, attempt in enumerate(attempts):
        yield _rollout(attempt, origin, judged=index == chosen)


def _rollout(attempt: Record, origin: Origin, *, judged: bool) -> Trajectory:
    info, config = attempt.get("info") or {}, attempt.get("replay_config") or {}
    # `replay_config` is JSON text in some files and an object in others; older files lack it.
    config = json_text.loads(config) if isinstance(config, str) else config
    opening, turns = _conversation(attempt)
    problem = config.get("problem_statement") or {}
    question = next((item["content"] for item in reversed(opening) if item["role"] == "user"), "")
    issue = ISSUE.search(question)
    statement = problem.get("text") or (issue.group(1) if issue else None)
    names = (problem.get("id"), (config.get("agent") or {}).get("name"), stem(origin.path))
    instance = find_instance(names) or _own_id(problem)
    # Counters begin at 0 and stay there for models that report no usage: unknown, not free.
    stats = {name: value for name, value in (info.get("model_stats") or {}).items() if value}
    return Trajectory(
        task_id=instance or f"{NAME}/{store.digest((statement or question).split())[:12]}",
        opening=opening,
        turns=turns,
        judged=judged,
        model=((config.get("agent") or {}).get("model") or {}).get("name"),
        statement=statement,
        submission=info.get("submission"),
        terminated_by=info.get("exit_status"),
        prompt_tokens=stats.get("tokens_sent"),
        completion_tokens=stats.get("tokens_received"),
        cost_usd=stats.get("instance_cost"),
        extra={"agent": NAME, "environment": attempt.get("environment"), "exit_status": info.get("exit_status")},
    )


def _own_id(problem: Record) -> str | None:
    """Return the id that a data set gives a problem; None for one that SWE-agent makes of its text, or at random."""
    own, text = problem.get("id"), problem.get("text")
    if not isinstance(own, str) or problem.get("type") == "empty":
        return None
    return None if isinstance(text, str) and sha256(text.encode()).hexdigest().startswith(own) else own


def _conversation(attempt: Record) -> tuple[list[Message], list[ImportedTurn]]:
    """Return opening and turns of the history, with demonstrations in the opening; else of the steps alone."""
    history, steps = attempt.get("history") or [], attempt.get("trajectory") or []
    if not history:
        # Without a history, the first query that a step kept holds the opening.
        query: list[Record] = next((step["query"] for step in steps if step.get("query")), [])
        turns = [
            ImportedTurn(
                step.get("response") or step["action"],
                [{"role": "user", "content": step["observation"]}],
                commands=[step["action"].strip()],
            )
            for step in steps
        ]
        return conversation(item for item in query if "role" in item), turns
    # Messages of a demonstration are marked in the history; they precede the task.
    demonstrations = [i for i, item in enumerate(history) if item.get("is_demo")]
    start = demonstrations[-1] + 1 if demonstrations else 0
    opening, turns = split_turns(conversation(history[start:]))
    actions = [item.get("action") for item in history[start:] if item["role"] == "assistant"]
    for turn, action in zip(turns, actions, strict=True):
        turn.commands = None if action is None else [action.strip()] if action.strip() else []
    return conversation(history[:start]) + opening, turns


READERS = (Reader(NAME, recognises, trajectories, frozenset({missing.PARSE})),)
