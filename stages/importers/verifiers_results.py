"""verifiers before 0.4: `results.jsonl`, one rollout a line, with the run's description in `metadata.json` beside it.

The id of an example identifies neither the problem nor the question everywhere (it may be a row number, and one prompt
may hide several answers), so a task is known by its environment, the user's messages and the answer.

Format read from PrimeIntellect-ai/verifiers at a60a606ec, `verifiers/legacy/utils/save_utils.py`, and from its recorded
runs.
"""

from collections.abc import Iterator
from typing import Any

from stages.importers import messages
from stages.importers.base import ImportedTurn, Origin, Record, Trajectory
from stages.messages import Message
from stages.rollouts import missing
from stages.runs import store

NAME = "verifiers"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
KNOWN = {
    "prompt",
    "completion",
    "info",
    "tool_defs",
    "trajectory",
    "answer",
    "reward",
    "error",
    "error_chain",
    "long_error_chain",
}


def recognises(record: Any) -> bool:
    """Prompt, completion and reward, and none of the columns that only TRL's logs have."""
    return (
        isinstance(record, dict)
        and {"prompt", "completion", "reward"} <= record.keys()
        and not {"advantage", "step", "rollout_id"} & record.keys()
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory]:
    """One rollout.

    A completion that never came is a rollout without steps and with an error, whatever reward stands beside it.
    """
    about = origin.sidecars.description(origin.path)
    env, opening = _env(about, origin), _conversation(record["prompt"], "user")
    lead, turns = messages.turns(_conversation(record["completion"], "assistant"))
    _attach(turns, record)
    lacks = set(MISSING) | (set() if "is_truncated" in record else {missing.FINISH})
    timing, usage, info = record.get("timing") or {}, record.get("token_usage") or {}, record.get("info") or {}
    yield Trajectory(
        task_id=f"{env}/{_key(env, record)}",
        env=env,
        opening=[*opening, *lead],
        turns=turns,
        missing=lacks,
        model=about.get("model") or _named(origin, 1),
        reward=record["reward"],
        terminated_by=record.get("stop_condition"),
        error=_error(record, turns),
        sampling=about.get("sampling_args"),
        prompt_tokens=_whole(usage.get("input_tokens")),
        completion_tokens=_whole(usage.get("output_tokens")),
        wall_s=_seconds(record.get("total_ms"), timing),
        task_data={name: record[name] for name in ("answer", "info") if record.get(name)},
        tools=record.get("tool_defs") or (info.get("oai_tools") if isinstance(info, dict) else None) or [],
        extra={name: value for name, value in record.items() if name not in KNOWN},
    )


def _conversation(value: Any, role: str) -> list[Message]:
    """Messages, also where a base model has plain text instead."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return [messages.message(item) for item in value or []]


def _env(about: Record, origin: Origin) -> str:
    return about.get("env_id") or about.get("env") or _named(origin, 0) or "verifiers"


def _named(origin: Origin, part: int) -> str | None:
    """Environment (0) or model (1) from the folder that runs are kept in: `ENV--MODEL/ID` or `ENV--MODEL__ID`."""
    for folder in (origin.path.parent.name, origin.path.parent.parent.name):
        env, dashes, rest = folder.partition("--")
        if dashes:
            return (env, rest.split("__")[0].replace("--", "/"))[part]
    return None


def _key(env: str, record: Record) -> str:
    prompt = record["prompt"]
    asked = prompt if isinstance(prompt, str) else [item["content"] for item in prompt or [] if item["role"] == "user"]
    info = record.get("info")
    known_by = record.get("answer") or (
        {k: v for k, v in info.items() if k != "oai_tools"} if isinstance(info, dict) else info
    )
    return store.digest([env, asked, known_by])[:12]


def _attach(turns: list[ImportedTurn], record: Record) -> None:
    """What a run keeps of each call: the last finish reason, and token ids where it kept the column `trajectory`."""
    if turns and record.get("is_truncated"):
        turns[-1].finish_reason = "length"
    calls = record.get("trajectory") or []
    if len(calls) == len(turns):
        for turn, call in zip(turns, calls, strict=True):
            tokens = call.get("tokens") or {}
            turn.prompt_ids = tokens.get("prompt_ids") or None
            turn.completion_ids = tokens.get("completion_ids") or None
            turn.logprobs = tokens.get("completion_logprobs") or None


def _error(record: Record, turns: list[ImportedTurn]) -> tuple[str, str] | None:
    error = record.get("error")
    if isinstance(error, dict):
        return str(error.get("error") or "error"), str(error.get("message") or error)
    if error:
        return "error", str(error)
    return None if turns else ("empty_completion", "the run recorded no completion; its reward says nothing")


def _seconds(total_ms: float | None, timing: Record) -> float | None:
    total = timing.get("total_ms", total_ms)
    return total / 1000 if total else timing.get("total")


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
