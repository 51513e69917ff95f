"""Inspect logs: `.json` with all samples, or `.eval` archives with one document a sample.

Texts that a log keeps apart (`attachment://`) are put back. A score is a number by Inspect's own rule (C, P, I and N,
yes and no); a score that is no single value is not a reward. What `export inspect` notes in a sample's metadata under
`composer` is read back.

Format read from UKGovernmentBEIS/inspect_ai at 499e6152e, `log/_log.py`, `log/_condense.py` and `scorer/_metric.py`.
"""

from collections.abc import Iterator
from typing import Any

from stages.importers.base import Drop, ImportedTurn, Origin, Record, Trajectory
from stages.importers.messages import message, turns
from stages.rollouts import missing

NAME = "inspect"
MISSING = frozenset({missing.PARSE, missing.ELISION, missing.CALL_IDS})
ATTACHED = "attachment://"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
STOPS = {"max_tokens": "length", "model_length": "length", "unknown": None}


def recognises(record: Any) -> bool:
    """A log has its evaluation's description; samples may be missing from it."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("eval"), dict)
        and "task" in record["eval"]
        and "model" in record["eval"]
    )


def trajectories(record: Record, origin: Origin) -> Iterator[Trajectory | Drop]:
    """One rollout a sample and epoch."""
    samples = record.get("samples") or []
    if not samples:
        yield origin.drop("log_without_samples", f"status {record.get('status')}, no samples in the log")
    for sample in samples:
        if isinstance(sample.get("messages"), list):
            yield _rollout(record["eval"], record.get("plan") or {}, sample)
        else:
            yield origin.drop("sample_without_messages", f"sample {sample.get('id')} is a summary")


def _rollout(about: Record, plan: Record, sample: Record) -> Trajectory:
    sample = _whole(sample, sample.get("attachments") or {})
    opening, actions = _conversation(sample)
    _answered(sample, actions)
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    usage = (sample.get("model_usage") or {}).get(about["model"]) or {}
    marked = (sample.get("metadata") or {}).get("composer") or {}
    return Trajectory(
        task_id=marked.get("task_id") or f"{about['task']}/{sample['id']}",
        env=marked.get("env") or about["task"],
        opening=opening,
        turns=actions,
        missing=set(MISSING)
        | (set() if scores else {missing.REWARD})
        | (set() if _ends(actions) else {missing.FINISH}),
        own_id=sample.get("uuid"),
        model=marked["model"] if marked else about["model"],
        statement=marked.get("prompt") or (sample["input"] if isinstance(sample.get("input"), str) else None),
        family=marked.get("family"),
        split=marked.get("split"),
        reward=_reward(about, scores),
        resolved=marked.get("gt_pass"),
        submission=marked.get("submission"),
        terminated_by=marked["terminated_by"] if marked else _terminated_by(sample),
        error=_error(sample, marked, actions),
        sampling=(about.get("model_generate_config") or {}) | (plan.get("config") or {}),
        prompt_tokens=usage.get("input_tokens"),
        completion_tokens=usage.get("output_tokens"),
        wall_s=sample.get("total_time"),
        task_data=marked["task_data"]
        if marked
        else {name: sample[name] for name in ("target", "choices", "metadata") if sample.get(name)},
        tools=marked.get("tools") or [],
        extra={"scores": scores, "epoch": sample.get("epoch")},
    )


def _ends(actions: list[ImportedTurn]) -> bool:
    return any(turn.finish_reason for turn in actions)


def _terminated_by(sample: Record) -> str | None:
    limit = sample.get("limit")
    kind = limit.get("type") if isinstance(limit, dict) else limit
    return kind or next((name for name in ("error", "limit") if sample.get(name)), None)


def _error(sample: Record, marked: Record, actions: list[ImportedTurn]) -> tuple[str, str] | None:
    error = sample.get("error")
    if marked.get("error_type"):
        return marked["error_type"], marked["error"] or ""
    if error:
        return "error", str(error.get("message") if isinstance(error, dict) else error)
    return None if actions else ("no_actions", "the sample holds no message of the model")


def _whole(value: Any, attachments: Record) -> Any:
    """A value with the texts that are kept apart put back; events, which repeat everything, keep their references."""
    if isinstance(value, str) and value.startswith(ATTACHED):
        return attachments.get(value.removeprefix(ATTACHED), value)
    if isinstance(value, dict):
        return {
            key: item if key in ("events", "attachments") else _whole(item, attachments) for key, item in value.items()
        }
    return [_whole(item, attachments) for item in value] if isinstance(value, list) else value


def _conversation(sample: Record) -> tuple[list[Any], list[ImportedTurn]]:
    """Assistant messages that the input brought along belong to the opening."""
    raw = [_with_error(item) for item in sample["messages"]]
    given = [i for i, item in enumerate(raw) if item["role"] == "assistant" and item.get("source") == "input"]
    start = given[-1] + 1 if given else 0
    opening, actions = turns([message(item) for item in raw[start:]])
    answers = [item for item in raw[start:] if item["role"] == "assistant"]
    for turn, item in zip(actions, answers, strict=True):
        errors = [
            call["parse_error"]
            for call in item.get("tool_calls") or []
            if isinstance(call, dict) and call.get("parse_error")
        ]
        turn.parse_error = str(errors[0]) if errors else None
    return [message(item) for item in raw[:start]] + opening, actions


def _with_error(item: Record) -> Record:
    """A tool message with its error in place of content that it has none of."""
    error = item.get("error") or item.get("tool_error")
    if item.get("role") == "tool" and error and not item.get("content"):
        return {**item, "content": error["message"] if isinstance(error, dict) else str(error)}
    return item


def _answered(sample: Record, actions: list[ImportedTurn]) -> None:
    """Why each answer ended and its usage, from the model's events.

    Where those do not match the turns, only the last turn's are known, from the sample's output.
    """
    outputs = [
        e["output"]
        for e in sample.get("events") or []
        if e.get("event") == "model" and not e.get("error") and e.get("output")
    ]
    if len(outputs) != len(actions):
        outputs = [{}] * (len(actions) - 1) + [sample.get("output") or {}] if actions else []
    for turn, output in zip(actions, outputs, strict=True):
        stop: Any = ((output.get("choices") or [{}])[0] or {}).get("stop_reason")
        usage = output.get("usage") or {}
        turn.finish_reason = STOPS.get(stop, stop)
        turn.prompt_tokens, turn.completion_tokens = usage.get("input_tokens"), usage.get("output_tokens")
        turn.latency_s, turn.cost_usd = output.get("time"), usage.get("total_cost")


def _reward(about: Record, scores: Record) -> float | None:
    """The score of the first scorer that the evaluation names."""
    order = [scorer["name"] for scorer in about.get("scorers") or [] if scorer.get("name") in scores] or list(scores)
    value = scores[order[0]].get("value") if order else None
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return (
                GRADES.get(value, GRADES.get(value.lower()))
                if value in GRADES or value.lower() in GRADES
                else float(value)
            )
        except ValueError:
            return None
    return None
