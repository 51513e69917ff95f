"""ATIF, the Agent Trajectory Interchange Format of Harbor and Terminal-Bench: versions 1.0 to 1.7, one document a file.

Steps of the agent are actions. Those that were copied from an earlier trajectory, and those that no model was asked
for, are context: they must not be trained on. Embedded trajectories of sub-agents are rollouts of their own; those in
files of their own are imported with these. Verdict, task and what went wrong stand in Harbor's `result.json`, in the
folder of the trajectory or the one above.

Format read from Harbor's documentation (harborframework.com/docs/trajectory-format), from the reference of NVIDIA's
NeMo Agent Toolkit 1.7 (`nat.atif`), and from programs that write it; Harbor's own source was not at hand.
"""

from collections.abc import Iterator
from typing import Any

from stages.formats.base import Drop, ImportedTurn, Origin, Reader, Record, Trajectory, family_of, seconds
from stages.formats.messages import arguments_text, text
from stages.messages import Message, Spoken, ToolCall, write
from stages.rollouts import missing
from stages.runs import store

NAME = "atif"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.FINISH, missing.CALL_IDS})
VERSION = "ATIF-v1."


def recognises(record: Any) -> bool:
    """A document that names its version and holds steps."""
    return (
        isinstance(record, dict)
        and str(record.get("schema_version", "")).startswith(VERSION)
        and isinstance(record.get("steps"), list)
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """The rollout of a document, then those of its sub-agents, which no verdict speaks of."""
    trial = origin.sidecars.trial(origin.path)
    waiting: list[tuple[Record, bool]] = [(record, False)]
    while waiting:
        document, side = waiting.pop(0)
        yield _rollout(document, {} if side else trial, side)
        waiting += [(inner, True) for inner in document.get("subagent_trajectories") or []]


def _rollout(document: Record, trial: Record, side: bool) -> Trajectory:
    agent, metrics = document.get("agent") or {}, document.get("final_metrics") or {}
    opening, turns = _conversation(document["steps"])
    asked = next((item["content"] for item in opening if item["role"] == "user"), "")
    named, reward = trial.get("task_name"), _reward(trial)
    model = agent.get("model_name") or next((s["model_name"] for s in document["steps"] if s.get("model_name")), None)
    times = [step["timestamp"] for step in document["steps"] if step.get("timestamp")]
    problem = trial.get("exception_info") or {}
    session = document.get("trajectory_id") or document.get("session_id")
    return Trajectory(
        task_id=str(named) if named else f"{NAME}/{store.digest(asked)[:12]}",
        env=str(trial.get("source") or NAME),
        opening=opening,
        turns=turns,
        missing=set(MISSING) | ({missing.REWARD} if reward is None else set()),
        own_id=f"{session}/{store.digest(document['steps'])[:8]}" if session else None,
        model=model,
        family=family_of(str(named)) if named else None,
        reward=reward,
        resolved=bool(reward) if reward in (0.0, 1.0) else None,
        terminated_by=problem.get("exception_type") if reward is not None else None,
        error=_error(problem, turns, reward),
        prompt_tokens=metrics.get("total_prompt_tokens"),
        completion_tokens=metrics.get("total_completion_tokens"),
        cost_usd=metrics.get("total_cost_usd"),
        wall_s=seconds(times[0], times[-1]) if times else None,
        tools=agent.get("tool_definitions") or [],
        extra={
            "agent": f"{agent.get('name', NAME)} {agent.get('version', '')}".strip(),
            "session": document.get("session_id"),
            "subagent": side,
            "rewards": (trial.get("verifier_result") or {}).get("rewards"),
            "continued_in": document.get("continued_trajectory_ref"),
        },
    )


def _reward(trial: Record) -> float | None:
    """The number called reward, or the only one."""
    rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    return None if value is None else float(value)


def _error(problem: Record, turns: list[ImportedTurn], reward: float | None) -> tuple[str, str] | None:
    """Why there is no verdict; an exception that was followed by one only says how the rollout ended."""
    if problem and reward is None:
        return str(problem.get("exception_type")), str(problem.get("exception_message"))
    return None if turns else ("no_actions", "the trajectory holds no action of a model")


def _conversation(steps: list[Record]) -> tuple[list[Message], list[ImportedTurn]]:
    opening: list[Message] = []
    turns: list[ImportedTurn] = []
    for step in steps:
        observed = _observed(step)
        if step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            turns.append(_turn(step, observed))
            continue
        role = "assistant" if step["source"] == "agent" else step["source"]
        said = write(_spoken(step)) if role == "assistant" else text(step.get("message"))
        (turns[-1].observed if turns else opening).extend([{"role": role, "content": said}, *observed])
    return opening, turns


def _spoken(step: Record) -> Spoken:
    calls = [
        ToolCall(str(c["function_name"]), arguments_text(c.get("arguments"))) for c in step.get("tool_calls") or []
    ]
    return Spoken(text(step.get("message")), tuple(calls), step.get("reasoning_content") or None)


def _observed(step: Record) -> list[Message]:
    """What came back, in the order of the calls; what answers no call is input like a user's."""
    order = {call.get("tool_call_id"): place for place, call in enumerate(step.get("tool_calls") or [])}
    results = (step.get("observation") or {}).get("results") or []
    known = sorted(results, key=lambda result: order.get(result.get("source_call_id"), len(order)))
    return [
        {"role": "tool" if result.get("source_call_id") in order else "user", "content": text(result.get("content"))}
        for result in known
    ]


def _turn(step: Record, observed: list[Message]) -> ImportedTurn:
    metrics = step.get("metrics") or {}
    return ImportedTurn(
        write(_spoken(step)),
        observed,
        prompt_ids=metrics.get("prompt_token_ids") or None,
        completion_ids=metrics.get("completion_token_ids") or None,
        logprobs=metrics.get("logprobs") or None,
        prompt_tokens=metrics.get("prompt_tokens"),
        completion_tokens=metrics.get("completion_tokens"),
        cost_usd=metrics.get("cost_usd"),
    )


READERS = (Reader(NAME, MISSING, recognises, trajectories),)
